"""What each part of a scheduler promises: the hooks of `SchedulerPart`, an order, and refusals that leave no trace."""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from fake_connector import Chances, FakeConnector
from fake_engine_core import VOCAB, FakeEngineCore
from scheduler_parts import part_of

from raycore.kvcache.snapshots import Snapshots
from raycore.messages import Feature, FeatureData
from raycore.parts.adapters.scheduler import AdapterLimit
from raycore.parts.constraints.scheduler import Constraints, GrammarMasks
from raycore.parts.drafts.scheduler.drafting import DraftPlanning
from raycore.parts.images.config import EncoderLimits
from raycore.parts.images.scheduler import EncoderInputs
from raycore.parts.routed_experts.scheduler import CachedExperts
from raycore.parts.transfers.scheduler.cache_events import CacheEvents
from raycore.parts.transfers.scheduler.transfers import Transfers
from raycore.scheduler.part import Hooks, SchedulerPart, Start
from raycore.scheduler.prefix_states import PrefixStates
from raycore.scheduler.prefixes import Prefixes
from raycore.scheduler.step_builder import StepBuilder

PARTS: dict[type[SchedulerPart], dict[str, Any]] = {
    Prefixes: {},
    PrefixStates: {"num_prefix_states": 4},
    DraftPlanning: {"num_right": [2, 0]},
    Transfers: {"connector": True},
    CacheEvents: {"kv_events": True},
    EncoderInputs: {"encoder": EncoderLimits(16, 16, True)},
    AdapterLimit: {"max_adapters": 1},
    Constraints: {},
    GrammarMasks: {"masks": True},
    CachedExperts: {"has_experts": True},
}
"""In order, with the options that give a fake engine such a part. Cached blocks come before states, which shorten them,
then what a connector has after both. Drafts come after states, whose positions they must not move. Metadata of a
connector is made of a plan that has its states."""

CALLED_ON_PARTS = {"attach", "request_limits", "set_aside", "requests", "held_blocks", "check_integrity"}
"""Methods that aren't bound as hooks: they are called for each part, or for the one that keeps a request."""


class NoCompiler:
    """No request of these tests has a constraint."""


def engine_with(kind: type[SchedulerPart], **options: Any) -> FakeEngineCore:
    given = PARTS[kind] | options
    if "connector" in given:
        given["connector"] = FakeConnector(4, Chances(is_async=0.0))
    if "masks" in given:
        given["masks"] = GrammarMasks(NoCompiler(), VOCAB)  # pyright: ignore[reportArgumentType]
    if "kv_events" in given:
        given["kv_events"] = []
    return FakeEngineCore(**given)


def submit(engine: FakeEngineCore, first: int, length: int) -> int:
    """Submit a request that concerns all parts that there are."""
    prompt, options = [first + i % 7 for i in range(length)], dict[str, Any]()
    if engine.encoder is not None:
        options["features"] = [Feature(f"image {first}", 5, 4)]
        options["feature_data"] = [FeatureData(f"image {first}".encode(), [1])]
    if part_of(engine.scheduler, AdapterLimit)._max_adapters:
        options["adapter"] = (0, 1)
    return engine.submit(prompt, max_tokens=6, **options)


def methods_of(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"}


HOOKS = methods_of(SchedulerPart)


def test_the_table_has_all_parts_in_their_order() -> None:
    made = {kind for kind in SchedulerPart.__subclasses__() if kind.__module__.startswith("raycore.")}
    assert set(PARTS) == made
    orders = [kind.order for kind in PARTS]
    assert orders == sorted(set(orders))


def test_the_scheduler_sorts_its_parts() -> None:
    engine = FakeEngineCore(num_right=[1], num_prefix_states=2, kv_events=[], encoder=EncoderLimits(16, 16, True))
    kinds = [type(part) for part in engine.scheduler.parts]
    assert kinds == [kind for kind in PARTS if kind in kinds]


@pytest.mark.parametrize("kind", PARTS)
def test_hooks_have_the_names_and_parameters_of_the_contract(kind: type[SchedulerPart]) -> None:
    own = methods_of(kind)
    assert any(name in HOOKS for name in own)
    for name in own.keys() & HOOKS.keys():
        assert inspect.signature(own[name]) == inspect.signature(HOOKS[name]), name
    # a misspelled hook would never be called
    assert own.keys() - HOOKS.keys() <= {"settle", "is_due", "make"}


def test_hooks_that_no_part_overrides_cost_nothing() -> None:
    bound = vars(Hooks([SchedulerPart()]))
    assert bound.keys() == HOOKS.keys() - CALLED_ON_PARTS
    assert set(bound.values()) == {()}


def test_hooks_are_bound_in_order_and_only_for_parts_that_have_them() -> None:
    told: list[str] = []

    class Early(SchedulerPart):
        def clearing(self) -> None:
            told.append("early")

    class Late(Early):
        order = 1

        def clearing(self) -> None:
            told.append("late")

        def take_back(self) -> bool:
            return True

    parts = [Early(), Late()]
    hooks = Hooks(parts)
    for clearing in hooks.clearing:
        clearing()
    assert told == ["early", "late"]
    assert hooks.take_back == (parts[1].take_back,)
    assert hooks.offer == ()


def test_a_part_that_adds_nothing_changes_nothing() -> None:
    part, start = SchedulerPart(), Start(None)  # pyright: ignore[reportArgumentType]
    assert part.offer(start).name == "START"
    assert part.limit_chunk(None, 2, 7, 9) == 7  # pyright: ignore[reportArgumentType]
    assert (list(part.ready()), list(part.requests()), list(part.held_blocks())) == ([], [], [])
    assert (part.load(), part.request_limits(), part.wants_step(), part.take_back()) == ({}, {}, False, False)
    assert start == Start(None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", PARTS)
def test_a_refused_request_leaves_no_trace(kind: type[SchedulerPart]) -> None:
    engine = engine_with(kind, num_blocks=12, max_num_batched_tokens=32)
    part, scheduler = part_of(engine.scheduler, kind), engine.scheduler
    submit(engine, 1, 26)
    engine.step()
    submit(engine, 30, 30)
    refused = scheduler._waiting.peek()
    before = state_of(part)
    assert before, "each part keeps something"
    for _ in range(2):
        scheduler._refused = None
        scheduler._admit_waiting(StepBuilder(scheduler._slots.batch(np.zeros(0, np.int64))), 16)
        assert scheduler._refused == (refused, scheduler._pool.num_free)
        assert state_of(part) == before
    engine.run()


@pytest.mark.parametrize("kind", PARTS)
def test_nothing_is_left_of_requests_that_have_ended(kind: type[SchedulerPart]) -> None:
    engine = engine_with(kind, num_blocks=14)
    for first in (1, 1, 8, 16, 1):
        submit(engine, first, 20)
        engine.step()
    engine.abort(3)
    engine.run()
    part = part_of(engine.scheduler, kind)
    assert (list(part.requests()), list(part.held_blocks())) == ([], [])
    part.check_integrity()
    engine.scheduler.start_over()
    engine.scheduler.check_integrity()


def state_of(part: Any) -> dict[str, str]:
    """What a part knows, as text. Not what it shares with the scheduler, nor a step that is only tried."""
    return dict(_state_of(part))


def _state_of(part: Any) -> Iterator[tuple[str, str]]:
    for name, value in vars(part).items():
        if isinstance(value, Snapshots):
            yield from ((f"{name}.{inner}", text) for inner, text in _state_of(value))
        elif isinstance(value, (int, float, bytes, list, dict, set, deque, OrderedDict, Counter, np.ndarray)):
            yield name, repr(value)
