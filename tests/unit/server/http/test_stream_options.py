"""What options of a server change in its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

from asgi_client import Client
from fake_engine import FakeEngine

from raycore.server.http.streaming import EventStream


def test_streams_without_news_send_comments(serve: Any, engine: FakeEngine) -> None:
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
