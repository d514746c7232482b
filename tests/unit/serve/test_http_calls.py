"""Requests to an application in a replica, and its response as a stream. Serve itself doesn't run."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fake_engine import FakeEngine

from raycore.serve.http_calls import HttpCall, ResponseStart, respond
from raycore.server import ServerOptions, build_app

JSON = [(b"content-type", b"application/json")]


def post(path: str, **body: Any) -> HttpCall:
    return HttpCall("POST", path, JSON, json.dumps(body).encode())


async def parts_of(app: Any, call: HttpCall) -> list[ResponseStart | bytes]:
    return [part async for part in respond(app, call)]


def test_a_response_comes_with_its_status_and_its_body():
    app = build_app(FakeEngine(), ServerOptions(("m",)))
    start, *body = asyncio.run(parts_of(app, post("/v1/completions", prompt="27 + 58 =")))
    assert isinstance(start, ResponseStart)
    assert start.status == 200
    assert json.loads(b"".join(body))["choices"][0]["text"] == " 85 is the answer"
    start, *body = asyncio.run(parts_of(app, HttpCall("GET", "/nowhere")))
    assert start.status == 404


def test_events_come_as_they_are_made():
    async def run() -> list[int]:
        engine, seen = FakeEngine(), []
        proceed = asyncio.Semaphore(1)
        engine.at_token = lambda index: proceed.acquire()
        async for part in respond(
            build_app(engine, ServerOptions(("m",))), post("/v1/completions", prompt="1", stream=True)
        ):
            if isinstance(part, bytes):
                seen.append(part.count(b"data: "))
            proceed.release()
        return seen

    seen = asyncio.run(run())
    assert len(seen) > 3


def test_a_caller_that_leaves_ends_the_request():
    async def run() -> FakeEngine:
        engine = FakeEngine()
        engine.at_token = lambda index: asyncio.sleep(0 if index < 2 else 3600)
        parts = respond(build_app(engine, ServerOptions(("m",))), post("/v1/completions", prompt="1", stream=True))
        assert isinstance(await anext(parts), ResponseStart)
        await anext(parts)
        await asyncio.wait_for(parts.aclose(), 5)
        return engine

    engine = asyncio.run(run())
    assert (engine.num_underway, len(engine.request_ids)) == (0, 1)


def test_an_applications_error_reaches_the_caller():
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(parts_of(app, HttpCall("GET", "/")))
