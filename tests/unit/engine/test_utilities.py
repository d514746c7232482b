"""Utilities are found by name, get arguments of their types, and reply at once or later."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from configs import make_config
from fake_executor import FakeExecutor

from raycore.engine.engine_profile import EngineProfile
from raycore.engine.mailbox import Utility
from raycore.engine.part import EnginePart
from raycore.engine.preparation import AdapterWaits
from raycore.engine.utilities import Utilities, call_utility
from raycore.errors import InvalidInput
from raycore.lora.request import LoRARequest
from raycore.messages import NO_LOAD
from raycore.parts.adapters.values import AddedAdapter, AddedAdapters


class Target:
    def __init__(self) -> None:
        self.later = Future[int]()
        self.functions = {"now": lambda: 1, "later": lambda: self.later}


def test_a_utility_may_reply_later() -> None:
    target = Target()
    now, later = Utility("now", (), {}), Utility("later", (), {})
    for command in (now, later):
        call_utility(target.functions, command)
    assert now.reply.result(0) == 1
    assert not later.reply.done()
    target.later.set_result(2)
    assert later.reply.result(0) == 2


def test_an_error_in_a_deferred_reply_of_a_utility_is_raised() -> None:
    target = Target()
    command = Utility("later", (), {})
    call_utility(target.functions, command)
    target.later.set_exception(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        command.reply.result(0)


def made(*parts: EnginePart, has_adapters: bool = False) -> Utilities:
    executor = FakeExecutor()
    scheduler = SimpleNamespace(reset_prefix_cache=lambda resets: resets, give_adapter=None)
    if has_adapters:
        parts += (AdapterWaits(executor, 1, scheduler),)
    profile = EngineProfile("engine", executor)
    return Utilities(make_config(), executor, scheduler, profile, 9, lambda: NO_LOAD, parts)


def call(functions: Mapping[str, Callable[..., Any]], method: str, *args: Any) -> Any:
    command = Utility(method, args, {})
    call_utility(functions, command)
    return command.reply.result(0)


def test_clients_may_call_exactly_the_listed_utilities() -> None:
    without = {
        *("check_health", "load", "memory_need", "profile", "reset_prefix_cache"),
        *("save_sharded_state", "reset_mm_cache", "reset_encoder_cache"),
    }
    assert set(made().functions) == without
    assert set(made(has_adapters=True).functions) - without == {"begin_adapter", "sync_adapters", "give_up_adapter"}


def test_calls_of_parts_take_the_place_of_those_that_do_nothing() -> None:
    reset: list[str] = []

    class Kept(EnginePart):
        def calls(self) -> dict[str, Callable[..., Any]]:
            return {"reset_mm_cache": self.reset_images, "reset_encoder_cache": self.reset_embeddings}

        def reset_images(self) -> None:
            reset.append("images")

        def reset_embeddings(self) -> None:
            reset.append("embeddings")

    for functions in (made().functions, made(Kept()).functions):
        assert call(functions, "reset_mm_cache") is None
        assert call(functions, "reset_encoder_cache") is None
    assert reset == ["images", "embeddings"]


def test_arguments_of_utilities_are_converted_to_the_types_of_their_signatures() -> None:
    functions = made().functions
    assert call(functions, "load") == NO_LOAD
    assert call(functions, "check_health") is None
    assert call(functions, "reset_prefix_cache", 1) is True
    assert call(functions, "memory_need", "2", [3]) == [("memory_need", (2, [3], 9))]
    with pytest.raises(InvalidInput, match=r"memory_need\(\): num_ranks='two'"):
        call(functions, "memory_need", "two", [3])


def test_the_adapter_utilities_take_the_drivers_list_of_added_adapters() -> None:
    functions = made(has_adapters=True).functions
    added = AddedAdapters(1, (AddedAdapter(LoRARequest("a", 1, "/a"), 1),))
    assert call(functions, "sync_adapters", added, []) == {}
    assert call(functions, "give_up_adapter", 5) is None


def test_every_utility_of_an_engine_has_types() -> None:
    for function in made(has_adapters=True).functions.values():
        typing.get_type_hints(function)
