"""Fixtures for the server without an engine."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator
from typing import Any

import fastapi.routing
import pytest
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.models.pooling import PoolingSpec
from raycore.server import ServerOptions, build_app, load_adapters


@pytest.fixture(scope="session", autouse=True)
def _fields_of_responses_are_made_once() -> Iterator[None]:
    """Most of the time that an application takes to build goes into them, and they are the same in each of them."""
    make = functools.lru_cache(maxsize=4096)(fastapi.routing.create_model_field)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastapi.routing, "create_model_field", make)
        yield


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def serve(engine: FakeEngine) -> Callable[..., Client]:
    """A client of a server of `engine` with these options."""

    def make(headers: dict[str, str] | None = None, **options: Any) -> Client:
        chosen = ServerOptions(("fake",), **options)
        return Client(build_app(engine, chosen, asyncio.run(load_adapters(engine, chosen))), headers)

    return make


@pytest.fixture
def pools() -> Callable[..., tuple[Client, FakeEngine]]:
    """A client of a server of a model that pools as the spec says, and the model's engine."""

    def make(spec: PoolingSpec, max_model_len: int = 200, **options: Any) -> tuple[Client, FakeEngine]:
        engine = FakeEngine(pooling=spec, max_model_len=max_model_len)
        return Client(build_app(engine, ServerOptions(("fake",), **options))), engine

    return make


@pytest.fixture
def client(serve: Callable[..., Client]) -> Client:
    return serve()
