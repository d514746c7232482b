"""What options of a server change in its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.server.http.errors import NotFound
from raycore.server.http.streaming import EventStream

CHAT = [{"role": "user", "content": "27 + 58 ="}]


def test_streams_without_an_event_send_comments(serve: Any, engine: FakeEngine) -> None:
    async def wait(index: int) -> None:
        if index in (0, 2):
            await asyncio.sleep(0.5)

    engine.at_token = wait
    plain: Client = serve()
    assert b": keep-alive" not in plain.complete({}, stream=True).body
    client: Client = serve(sse_keep_alive_interval=0.1)
    parts = client.complete({}, stream=True).body.split(b"\n\n")
    comments = [index for index, part in enumerate(parts) if part == b": keep-alive"]
    assert comments[0] == 0
    assert any(parts[index - 1].startswith(b"data: ") for index in comments[1:])
    assert parts[-2:] == [b"data: [DONE]", b""]
    events = [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2] if part.startswith(b"data: ")]
    assert "".join(event["choices"][0]["text"] for event in events) == " 85 is the answer"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 20}),
        ("/v1/responses", {"input": "27 + 58 ="}),
        ("/v1/responses", {"input": "27 + 58 =", "background": True}),
        ("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": {}}),
    ],
)
def test_streams_of_all_endpoints_send_comments(serve: Any, engine: FakeEngine, path: str, body: dict) -> None:
    async def wait(index: int) -> None:
        if index == 1:
            await asyncio.sleep(0.5)

    engine.at_token = wait
    answer = serve(sse_keep_alive_interval=0.1).post(path, {"model": "fake", "stream": True} | body)
    parts = answer.body.split(b"\n\n")
    assert b": keep-alive" in parts[1:]
    assert b": keep-alive" not in serve().post(path, {"model": "fake", "stream": True} | body).body


def test_the_events_of_a_response_that_is_not_stored_are_an_error_after_a_comment() -> None:
    async def events() -> AsyncGenerator[Any, None]:
        await asyncio.sleep(0.1)
        raise NotFound("response 'a' isn't stored")
        yield

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.sleep(20)

    scope = {"type": "http", "path": "/v1/responses/a", "raycore.request_id": "1"}
    stream = EventStream(events(), has_names=True, keep_alive_s=0.03)
    asyncio.run(asyncio.wait_for(stream(scope, receive, send), 10))
    body = b"".join(message.get("body", b"") for message in sent)
    assert body.startswith(b": keep-alive")
    assert b'event: error\ndata: {"error"' in body


def test_an_error_after_a_comment_is_an_event(serve: Any, engine: FakeEngine) -> None:
    async def fail(index: int) -> None:
        await asyncio.sleep(0.3)
        raise ZeroDivisionError

    engine.at_token = fail
    answer = serve(sse_keep_alive_interval=0.05).complete({}, stream=True)
    assert answer.status == 200
    assert b'data: {"error"' in answer.body


def test_a_client_that_leaves_during_a_pause_ends_its_request(serve: Any, engine: FakeEngine) -> None:
    async def wait(index: int) -> None:
        if index == 1:
            await asyncio.sleep(10)

    engine.at_token = wait
    client: Client = serve(sse_keep_alive_interval=0.05)
    body = {"prompt": "27 + 58 =", "stream": True}
    asyncio.run(client.call("POST", "/v1/completions", body, leave_after=3))
    assert len(engine.aborted) == 1


def test_a_client_that_leaves_without_having_read_a_comment_ends_its_request() -> None:
    has_ended, is_stuck = asyncio.Event(), asyncio.Event()

    async def events() -> AsyncGenerator[int, None]:
        try:
            await asyncio.sleep(20)
            yield 1
        finally:
            has_ended.set()

    async def send(message: Any) -> None:
        if message.get("body", b"").startswith(b": keep-alive"):
            is_stuck.set()
            await asyncio.sleep(20)

    async def receive() -> dict[str, str]:
        await is_stuck.wait()
        return {"type": "http.disconnect"}

    async def scenario() -> bool:
        await EventStream(events(), keep_alive_s=0.01)({"type": "http"}, receive, send)
        return has_ended.is_set()

    assert asyncio.run(asyncio.wait_for(scenario(), 10))
