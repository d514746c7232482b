"""Whoever watches an engine sees every request, whichever public method asks for it. The ranks are the test's."""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from answering_client import POOLS, AnsweringClient, engine

import raycore
from raycore import AsyncLLM, SamplingParams
from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.request_log import RequestLog
from raycore.client.watchers import UNWATCHED, Note, Watcher, Watchers
from raycore.errors import RequestFailed
from raycore.inputs import StreamingInput
from raycore.server.contract.engine import ServingEngine
from raycore.server.multi_process.client_engine import ClientEngine

PROMPT = {"prompt_token_ids": [1, 2]}
SHORT = SamplingParams(max_tokens=1)


async def all_of(outputs: AsyncGenerator[Any, None]) -> None:
    async with aclosing(outputs):
        async for _ in outputs:
            pass


async def added(llm: AsyncLLM, params: Any) -> None:
    await (await llm.add_request("a", PROMPT, params)).get()


async def pieces() -> AsyncGenerator[StreamingInput, None]:
    yield StreamingInput(PROMPT)


WAYS: dict[str, list[Callable[[AsyncLLM], Any]]] = {
    "generate": [
        lambda llm: all_of(llm.generate(PROMPT, SHORT, "a")),
        lambda llm: all_of(llm.generate(PROMPT, SHORT, "a", stream=False)),
        lambda llm: all_of(llm.generate(pieces(), SHORT, "a")),
    ],
    "add_request": [lambda llm: added(llm, SHORT), lambda llm: added(llm, POOLS)],
    "beam_search": [lambda llm: llm.beam_search(PROMPT, BeamSearchParams(1, 1), "a")],
    "encode": [lambda llm: all_of(llm.encode(PROMPT, POOLS, "a"))],
    "encode_all": [lambda llm: llm.encode_all([PROMPT], POOLS, ["a"])],
    "ask": [lambda llm: all_of(llm.ask([Ask(PROMPT, SHORT, "a")]))],
}
"""The public ways to ask for something."""
TAKES_NO_REQUEST = {"check", "check_pooling", "abort", "abort_requests"}
EACH_WAY = [pytest.param(way, id=f"{name} {number}") for name in WAYS for number, way in enumerate(WAYS[name])]


class Seen(Watcher):
    """Notes what it sees."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    @contextmanager
    def watching(self, asks: Sequence[Ask]) -> Generator[Note]:
        self.told.append([(ask.request_id, ask.parsed.token_ids) for ask in asks])
        try:
            yield lambda output: self.told.append(output.request_id)
        except Exception as error:
            self.told.append(str(error))
            raise
        finally:
            self.told.append("end")


def test_the_ways_to_ask_are_all_that_take_prompts() -> None:
    asking = {"prompt", "prompts", "asks", "prompt_token_ids"}
    members = inspect.getmembers(AsyncLLM, inspect.isfunction)
    found = {name for name, each in members if asking & set(inspect.signature(each).parameters)}
    assert found - TAKES_NO_REQUEST == set(WAYS)


@pytest.mark.parametrize("way", EACH_WAY)
def test_a_watcher_sees_each_request_once_from_beginning_to_end(way: Callable[[AsyncLLM], Any], tokenizer: Any) -> None:
    llm, seen = engine(AnsweringClient(tokenizer)), Seen()
    llm.watch(seen)
    asyncio.run(way(llm))
    assert seen.told == [[("a", [1, 2])], "a", "end"]


@pytest.mark.parametrize("way", EACH_WAY)
def test_a_watcher_sees_why_a_request_failed(way: Callable[[AsyncLLM], Any], tokenizer: Any) -> None:
    llm, seen = engine(AnsweringClient(tokenizer, RequestFailed("worker died"))), Seen()
    llm.watch(seen)
    with pytest.raises(RequestFailed):
        asyncio.run(way(llm))
    assert seen.told == [[("a", [1, 2])], "worker died", "end"]


@pytest.mark.parametrize("way", EACH_WAY)
def test_each_request_is_logged_once(way: Callable[[AsyncLLM], Any], tokenizer: Any, caplog: Any) -> None:
    llm = engine(AnsweringClient(tokenizer))
    llm.watch(RequestLog(tokenizer))
    with caplog.at_level(logging.INFO, "raycore.server.request_log"):
        asyncio.run(way(llm))
    [message] = caplog.messages
    assert message.startswith("request a: 2 prompt tokens, ")


def test_a_request_that_is_left_early_has_ended(tokenizer: Any) -> None:
    async def leave() -> None:
        (await llm.add_request("a", PROMPT, SHORT)).close()

    llm, seen = engine(AnsweringClient(tokenizer)), Seen()
    llm.watch(seen)
    asyncio.run(leave())
    assert seen.told == [[("a", [1, 2])], "end"]


def test_watchers_may_need_all_tokens() -> None:
    watchers, ask = Watchers(), Ask(PROMPT, SHORT, "a", stream="text")
    assert watchers.wanted(ask).stream == "text"
    assert watchers.watch([ask]) is UNWATCHED
    watchers.add(Seen())
    assert watchers.wanted(ask).stream == "text"
    greedy = Seen()
    greedy.needs_all_tokens = True
    watchers.add(greedy)
    assert watchers.wanted(ask).stream is True


def test_an_engine_has_one_watcher_of_a_kind(tokenizer: Any) -> None:
    llm, first, second = engine(AnsweringClient(tokenizer)), Seen(), Seen()
    llm.watch(first)
    llm.watch(second)
    asyncio.run(all_of(llm.generate(PROMPT, SHORT, "a")))
    assert (first.told, len(second.told)) == ([], 3)


def test_servers_ask_by_one_method() -> None:
    for engine_class in (ServingEngine, ClientEngine):
        members = inspect.getmembers(engine_class, inspect.isfunction)
        found = {
            name for name, each in members if {"prompt", "prompts", "asks"} & set(inspect.signature(each).parameters)
        }
        assert found == {"ask", "check"}, "check runs nothing"


def test_nothing_forwards_what_it_does_not_have() -> None:
    """Who wraps an object and forwards by `__getattr__` misses the calls that the object gets later."""
    root = Path(raycore.__file__).parent
    found = {
        f"{path.relative_to(root)}: {node.name}"
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] != "compat"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
        and method.name == "__getattr__"
        and any(isinstance(each, ast.Call) and getattr(each.func, "id", "") == "getattr" for each in ast.walk(method))
    }
    assert found == {"profile_session.py: _Recorded"}  # stands for a part of a step, and records its calls
