"""HTTP requests between deployments: to an ASGI application in a replica, and back as a stream. No Ray here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
from starlette.types import ASGIApp, Message, Scope

_GOODBYE_S = 10.0
"""Seconds that an application has to abort a request whose client has left."""


class HttpCall(msgspec.Struct, frozen=True):
    """An HTTP request with its whole body."""

    method: str
    path: str
    """Without the prefix at which the application is mounted."""
    headers: list[tuple[bytes, bytes]] = []
    body: bytes = b""
    query: bytes = b""

    def scope(self) -> Scope:
        """The request as ASGI applications get it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": self.headers,
            "client": None,
            "server": None,
        }


class ResponseStart(msgspec.Struct, frozen=True):
    """How a response begins."""

    status: int
    headers: list[tuple[bytes, bytes]]


async def respond(app: ASGIApp, call: HttpCall) -> AsyncGenerator[ResponseStart | bytes, None]:
    """Have an application respond. Yields `ResponseStart` first, then what the body has got since the previous part.

    If the generator is closed, or its task cancelled, the application is told that the client has left.
    """
    messages: list[Message] = [{"type": "http.request", "body": call.body, "more_body": False}]
    sent: list[Message] = []
    has_left, has_sent = asyncio.Event(), asyncio.Event()

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await has_left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)
        has_sent.set()

    running = asyncio.ensure_future(app(call.scope(), receive, send))
    running.add_done_callback(lambda _: has_sent.set())
    try:
        while sent or not running.done():
            await has_sent.wait()
            has_sent.clear()
            new, sent[:] = sent[:], []
            for message in new:
                if message["type"] == "http.response.start":
                    yield ResponseStart(
                        message["status"], [(bytes(name), bytes(value)) for name, value in message["headers"]]
                    )
            if part := b"".join(message.get("body", b"") for message in new):
                yield part
        await running
    finally:
        has_left.set()
        if not running.done():
            await asyncio.wait((running,), timeout=_GOODBYE_S)
        running.cancel()
        with suppress(asyncio.CancelledError, Exception):  # nobody waits for the response any more
            await running
