"""A server of `/v1/responses` whose model writes a given text, whatever it is asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import tool_templates
from asgi_client import Answer, Client
from fake_engine import FakeEngine
from openai import AsyncOpenAI

from raycore.server import ServerOptions, build_app
from raycore.server.dialects.responses.store import ResponseStore

T = TypeVar("T")

CALL = '<tool_call>\n{"name": "get_time", "arguments": {"city": "Ulm"}}\n</tool_call>'
OTHER_CALL = CALL.replace("Ulm", "Rom")
TOOL: dict[str, Any] = {"type": "function", "name": "get_time", "parameters": {"type": "object"}, "strict": None}


class Responder:
    """`engine` is the server's; `client` calls the server."""

    def __init__(
        self, text: str = "Seven.", store: ResponseStore | None = None, max_http_logprobs: int = 20, **options: Any
    ) -> None:
        chosen = {"chat_template": tool_templates.HERMES, **options}
        self.engine = FakeEngine(text, max_model_len=4000)
        self.engine.max_http_logprobs = max_http_logprobs
        self.app = build_app(self.engine, ServerOptions(("fake",), **chosen), response_store=store)
        self.client = Client(self.app)

    def post(self, given: Any = "How many?", **body: Any) -> Answer:
        return self.client.post("/v1/responses", {"input": given, **body})

    def answer(self, given: Any = "How many?", **body: Any) -> dict[str, Any]:
        """The response."""
        answer = self.post(given, **body)
        assert answer.status == 200, answer.body
        return answer.json

    def output(self, given: Any = "How many?", **body: Any) -> list[tuple[str, str]]:
        """(kind, text) of each item, the same whole and streamed."""
        response = self.answer(given, **body)
        events = self.events(given, stream=True, **body)
        assert shown(events[-1]["response"]["output"]) == shown(response["output"])
        assert shown(assembled(events)) == shown(response["output"])
        return shown(response["output"])

    def events(self, given: Any = "How many?", **body: Any) -> list[dict[str, Any]]:
        """The events of a stream."""
        answer = self.post(given, **{"stream": True, **body})
        assert answer.status == 200, answer.body
        return events_of(answer)

    def prompt(self, given: Any = "How many?", **body: Any) -> str:
        """The text that the model goes on with."""
        self.answer(given, **body)
        return self.last_prompt

    @property
    def last_prompt(self) -> str:
        return self.engine.tokenizer.decode(self.engine.asked[-1], skip_special_tokens=False)

    def with_openai(self, use: Callable[[AsyncOpenAI], Awaitable[T]]) -> T:
        """Run `use` with OpenAI's client of the server."""

        async def run() -> T:
            http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app))
            async with AsyncOpenAI(
                api_key="none", base_url="http://test/v1", http_client=http, max_retries=0
            ) as client:
                return await use(client)

        return asyncio.run(run())


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The events of a named stream. Their names, their numbers and the end of the stream are checked."""
    assert answer.headers is not None
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = answer.body.decode()
    assert told.endswith("\n\n") or not told
    events: list[dict[str, Any]] = []
    for lines in told.split("\n\n")[:-1]:
        name, data = lines.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    return events


def shown(output: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """(kind, text) of each item of an output. The text of a call is its arguments."""
    kinds: list[tuple[str, str]] = []
    for item in output:
        if item["type"] == "function_call":
            kinds.append((item["name"], item["arguments"]))
        else:
            (part,) = item["content"]
            kinds.append((item["type"], part["text"]))
    return kinds


def assembled(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as its deltas say it. That each item is told in the documented order is checked."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append({**event["item"], "content": [], "is_open": True})
            continue
        if "output_index" not in event:
            continue
        item = items[event["output_index"]]
        assert item["is_open"]
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            assert event["content_index"] == 0
            item["content"].append(dict(event["part"]))
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind.endswith("_text.delta"):
            item["content"][0]["text"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["name"], event["arguments"]) == (item["name"], item["arguments"])
        elif kind.endswith("_text.done"):
            assert event["text"] == item["content"][0]["text"]
        elif kind == "content_part.done":
            assert event["part"]["text"] == item["content"][0]["text"]
        elif kind == "output_item.done":
            assert event["item"]["status"] != "in_progress"
            assert shown([event["item"]]) == shown([item])
            item["is_open"] = False
    assert not any(item["is_open"] for item in items)
    return items
