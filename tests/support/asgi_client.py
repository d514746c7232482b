"""Calls an ASGI application in process, and may leave before the answer is complete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from waiting import LONG_S

Headers = dict[str, str | None]
"""None stands for a header that isn't sent."""


@dataclass
class Answer:
    status: int | None = None
    headers: dict[str, str] | None = None
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> tuple[int | None, str, str | None]:
        """(status, type, param) of an answer that is an error."""
        error = self.json["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"]
        return self.status, error["type"], error["param"]

    @property
    def events(self) -> list[Any]:
        """The data of each event; the last one, which isn't JSON, is left out."""
        assert self.headers is not None
        assert self.headers["content-type"].startswith("text/event-stream")
        assert self.body.endswith(b"data: [DONE]\n\n")
        events = self.body.decode().split("\n\n")[:-2]
        assert all(event.startswith("data: ") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


class Client:
    """`leave_after`: events of an answer after which the client closes the connection; 0: once it has sent the body."""

    def __init__(self, app: Any, headers: dict[str, str] | None = None) -> None:
        self._app = app
        self._headers = headers or {}

    def get(self, path: str) -> Answer:
        return asyncio.run(self.call("GET", path))

    def post(self, path: str, body: Any = None, **kwargs: Any) -> Answer:
        return asyncio.run(self.call("POST", path, body, **kwargs))

    def complete(self, headers: Headers | None = None, **body: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": "27 + 58 =", **body}, headers=headers)

    def chat(self, headers: Headers | None = None, **body: Any) -> Answer:
        messages = [{"role": "user", "content": "27 + 58?"}]
        return self.post("/v1/chat/completions", {"messages": messages, **body}, headers=headers)

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        raw: Iterable[bytes] | None = None,
        headers: Headers | None = None,
        leave_after: int | None = None,
        stalls: bool = False,
    ) -> Answer:
        """
        Args:
            raw: the body's parts instead of `body`, sent without saying how long they are together.
            stalls: another part is announced, and never comes.
        """
        parts = list(raw) if raw is not None else [b"" if body is None else json.dumps(body).encode()]
        sent = {"content-type": "application/json", **self._headers, **(headers or {})}
        if raw is None:
            sent["content-length"] = str(len(parts[0]))
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in sent.items() if value is not None],
            "http_version": "1.1",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
        }
        answer, has_left = Answer(), asyncio.Event()
        num_events = 0
        if leave_after == 0:
            has_left.set()

        async def receive() -> dict[str, Any]:
            if parts:
                return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts) or stalls}
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            nonlocal num_events
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")
                num_events += 1
                if num_events == leave_after:
                    has_left.set()

        await asyncio.wait_for(self._app(scope, receive, send), LONG_S)
        return answer
