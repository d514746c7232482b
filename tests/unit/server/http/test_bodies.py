"""Long bodies wait for each other, and nobody else waits for them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from asgi_client import Answer, Client
from fake_engine import EMBEDS, FakeEngine
from waiting import LONG_S

from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.server import ServerOptions, build_app

LONG = "a" * 300_000
MEDIUM = "a" * 20_000
NUM_LONG = 5
"""More than `to_thread` has threads in these tests."""


class HeldTokenizer:
    """The demo model's tokenizer, which holds texts as long as `LONG` until it is let go."""

    def __init__(self, engine: FakeEngine) -> None:
        self._tokenizer = engine.tokenizer
        self._lock = threading.Lock()
        self.goes_on = threading.Event()
        self.num_begun = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        self._hold([text])
        return self._tokenizer.encode(text[:9], *args, **kwargs)

    def encode_batch(self, texts: list[str], *args: Any, **kwargs: Any) -> list[list[int]]:
        self._hold(texts)
        return self._tokenizer.encode_batch([text[:9] for text in texts], *args, **kwargs)

    def _hold(self, texts: list[str]) -> None:
        if max(map(len, texts)) < len(LONG):
            return
        with self._lock:
            self.num_begun += 1
        assert self.goes_on.wait(LONG_S)


Served = tuple[Client, HeldTokenizer, Any]


@pytest.fixture
def serve_held() -> Callable[..., Served]:
    def make(pooling: PoolingSpec | None) -> Served:
        engine = FakeEngine(max_model_len=1 << 20, pooling=pooling)
        held: Any = HeldTokenizer(engine)
        engine.tokenizer = held
        app = build_app(engine, ServerOptions(("fake",)))
        return Client(app), held, app

    return make


def ask(client: Client, path: str, text: str, **how: Any) -> asyncio.Task[Answer]:
    field = "prompt" if path in ("/v1/completions", "/tokenize") else "input"
    return asyncio.create_task(client.call("POST", path, {field: text, "model": "fake", "max_output_tokens": 8}, **how))


async def until(holds: Callable[[], bool]) -> None:
    async def poll() -> None:
        while not holds():
            await asyncio.sleep(0)

    await asyncio.wait_for(poll(), LONG_S)


@pytest.mark.parametrize(
    ("path", "pooling"),
    [("/v1/completions", None), ("/tokenize", None), ("/v1/responses", None), ("/v1/embeddings", EMBEDS)],
)
def test_nobody_else_waits_for_long_bodies(
    serve_held: Callable[..., Served], path: str, pooling: PoolingSpec | None
) -> None:
    client, held, _ = serve_held(pooling)

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_LONG - 1))
        long = [ask(client, path, LONG) for _ in range(NUM_LONG)]
        try:
            await until(lambda: held.num_begun >= 2)
            assert await asyncio.wait_for(asyncio.to_thread(lambda: "done"), LONG_S) == "done"
            answer = await asyncio.wait_for(ask(client, path, MEDIUM), LONG_S)
            assert answer.status == 200, answer.json
            assert held.num_begun == 2
        finally:
            held.goes_on.set()
        assert {answer.status for answer in await asyncio.gather(*long)} == {200}

    asyncio.run(scenario())
    assert held.num_begun == NUM_LONG


def test_a_long_body_whose_client_has_left_is_not_begun(serve_held: Callable[..., Served]) -> None:
    client, held, _ = serve_held(None)

    async def scenario() -> None:
        first = [ask(client, "/v1/completions", LONG) for _ in range(2)]
        try:
            await until(lambda: held.num_begun == 2)
            left = await asyncio.wait_for(ask(client, "/v1/completions", LONG, leave_after=0), LONG_S)
        finally:
            held.goes_on.set()
        assert left.status == 499
        assert {answer.status for answer in await asyncio.gather(*first)} == {200}

    asyncio.run(scenario())
    assert held.num_begun == 2


def test_long_bodies_that_wait_are_not_begun_once_the_server_ends(serve_held: Callable[..., Served]) -> None:
    client, held, app = serve_held(None)

    async def scenario() -> None:
        async with app.router.lifespan_context(app):
            long = [ask(client, "/v1/completions", LONG) for _ in range(4)]
            await until(lambda: held.num_begun == 2)
        held.goes_on.set()
        for each in long:
            with suppress(asyncio.CancelledError):
                await each

    asyncio.run(scenario())
    assert held.num_begun == 2
