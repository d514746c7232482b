"""Whoever watches an engine sees all calls that take prompts."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from fake_engine import FakeEngine

from raycore.server.generation import ServingEngine
from raycore.server.request_log import LoggedEngine
from raycore.server.tracing import TracedEngine
from raycore.server.watched_engine import WatchedEngine


def calls_with_prompts() -> dict[str, inspect.Signature]:
    """The calls of the engine's interface that run prompts, by name."""
    members = inspect.getmembers(ServingEngine, inspect.isfunction)
    signatures = {name: inspect.signature(member) for name, member in members if not name.startswith("_")}
    return {name: each for name, each in signatures.items() if {"prompt", "prompts"} & set(each.parameters)}


def test_every_call_that_takes_prompts_is_watched() -> None:
    found = calls_with_prompts()
    assert set(found) == {"generate", "beam_search", "encode_all"}
    watched = {name: inspect.signature(getattr(WatchedEngine, name, lambda: None)) for name in found}
    assert watched == found


@pytest.mark.parametrize("watcher", [LoggedEngine, TracedEngine])
def test_whoever_watches_has_the_calls_from_one_place(watcher: type[Any]) -> None:
    assert issubclass(watcher, WatchedEngine)
    assert not set(calls_with_prompts()) & set(vars(watcher))


def test_a_watcher_that_leaves_out_a_kind_of_call_cannot_be_made() -> None:
    class OnlyGenerating(WatchedEngine):
        _generation = LoggedEngine._generation

    with pytest.raises(TypeError, match="_pooling"):
        OnlyGenerating(FakeEngine())  # pyright: ignore[reportAbstractUsage]
