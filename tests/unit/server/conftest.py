"""Fixtures for the server without an engine."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import fastapi.dependencies.utils
import fastapi.routing
import pytest
from asgi_client import Client
from fake_engine import FakeEngine

from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.server import ServerOptions, build_app, load_adapters


@pytest.fixture(scope="session", autouse=True)
def _routes_are_analyzed_once() -> Iterator[None]:
    """Most of the time that an application takes to build goes into that, and it is the same in each of them."""
    utils = fastapi.dependencies.utils
    make_field = functools.lru_cache(maxsize=4096)(fastapi.routing.create_model_field)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fastapi.routing, "create_model_field", make_field)
        patch.setattr(utils, "analyze_param", _remembering(utils.analyze_param, _key_of_param))
        patch.setattr(utils, "get_typed_signature", _remembering(utils.get_typed_signature, _key_of_signature))
        patch.setattr(utils, "_get_signature", _remembering(utils._get_signature, _key_of_signature))
        yield


def _remembering(function: Callable[..., Any], key_of: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called once for arguments with the same key. `key_of` returns None for those without one."""
    known: dict[Any, Any] = {}

    def remembered(*args: Any, **options: Any) -> Any:
        key = key_of(*args, **options)
        try:
            is_known = key in known
        except TypeError:  # a part of it can't be hashed
            key = None
        if key is None:
            return function(*args, **options)
        if not is_known:
            known[key] = function(*args, **options)
        return known[key]

    return remembered


def _key_of_param(*, param_name: str, annotation: Any, value: Any, path_param_names: set[str]) -> Any:
    return param_name, annotation, type(value), value, frozenset(path_param_names)


def _key_of_signature(call: Any) -> Any:
    """Handlers are made anew in each application, from the same code. All of an endpoint's have the same signature."""
    if not inspect.isfunction(call):
        return None
    if vars(call):
        return id(vars(call)["__signature__"]) if "__signature__" in vars(call) else None
    return (
        call.__code__,
        call.__defaults__,
        tuple((call.__kwdefaults__ or {}).items()),
        tuple(call.__annotations__.items()),
    )


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
