"""What each part of an engine promises: the hooks of `EnginePart`, and nothing that the base class adds."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from configs import make_config
from fake_executor import FakeExecutor, request, run_to_end

from raycore.engine import parts  # noqa: F401  # all classes of parts
from raycore.engine.core import EngineCore
from raycore.engine.part import EngineHooks, EnginePart, Prepared
from raycore.engine.parts import make_parts
from raycore.engine.preparation import AdapterWaits, GrammarWaits, NoAdapters
from raycore.engine.scheduling import Shared
from raycore.engine.step_timing import SpeculationTiming
from raycore.messages import StepPlan
from raycore.parts.experts.engine.expert_group import ExpertGroup
from raycore.parts.transfers.connectors.identity import Identity
from raycore.parts.transfers.engine import ConnectorCalls, KVEvents
from raycore.parts.weights.engine import RankWeights
from raycore.scheduler.outputs import StepOutputs

CALLED_ON_PARTS = {"calls", "addresses", "cache_logs", "close"}
ALWAYS = [RankWeights, ExpertGroup, GrammarWaits]
"""What each engine has."""


def methods_of(kind: type) -> dict[str, Any]:
    return {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"}


HOOKS = methods_of(EnginePart)
KINDS = [kind for kind in EnginePart.__subclasses__() if kind.__module__.startswith("raycore.")]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_have_the_names_and_parameters_of_the_contract(kind: type[EnginePart]) -> None:
    own = methods_of(kind)
    assert own.keys() & HOOKS.keys()
    for name in own.keys() & HOOKS.keys():
        assert inspect.signature(own[name]) == inspect.signature(HOOKS[name]), name
    # a misspelled hook would never be called
    assert own.keys() - HOOKS.keys() <= {"clear"}


def test_hooks_that_no_part_overrides_cost_nothing() -> None:
    bound = vars(EngineHooks([EnginePart()]))
    assert bound.keys() == HOOKS.keys() - CALLED_ON_PARTS
    assert set(bound.values()) == {()}


def test_a_part_that_adds_nothing_changes_nothing() -> None:
    part, asked = EnginePart(), request(1)
    assert (part.calls(), part.load(), part.complete(asked)) == ({}, {}, [])
    assert (part.must_wait(asked), part.keeps_back(1), part.is_preparing(), part.pause_s()) == (False, False, False, 0)
    assert (part.take_prepared(), part.addresses(), part.cache_logs()) == (Prepared(), (), ())


def test_parts_come_in_this_order() -> None:
    shared: Any = Shared(*[SimpleNamespace(close=None)] * 3)  # pyright: ignore[reportArgumentType]
    config = make_config()
    scheduler = SimpleNamespace(take_identity=lambda digest: None)
    engine: Any = SimpleNamespace(config=config, executor=FakeExecutor(), scheduler=scheduler)
    # events come before the connector, whose last ones they take when they close
    kinds = [type(part) for part in make_parts(engine, shared, Identity(config), is_new=False)]
    assert kinds == [*ALWAYS, NoAdapters, SpeculationTiming, SimpleNamespace, ConnectorCalls]
    assert issubclass(KVEvents, EnginePart)


def test_an_engine_of_plain_texts_has_nothing_to_call_in_a_step() -> None:
    hooks = EngineCore(make_config(), FakeExecutor())._hooks
    assert (hooks.step_planned, hooks.step_done, hooks.between_steps, hooks.pause_s, hooks.load) == ((),) * 5


class Everything(EnginePart):
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def calls(self) -> dict[str, Any]:
        return {"load": lambda: "its own"}

    def complete(self, request: Any) -> list[str]:
        return ["an image"] if request.seq_id == 9 else []

    def added(self, request: Any) -> None:
        self.told.append(("added", request.seq_id))

    def dropped(self, seq_id: int) -> None:
        self.told.append(("dropped", seq_id))

    def step_planned(self, plan: StepPlan, planned_s: float) -> None:
        self.told.append(("planned", plan.step))

    def step_done(self, plan: StepPlan, outputs: StepOutputs) -> None:
        self.told.append(("done", plan.step))

    def load(self) -> dict[str, Any]:
        return {"decode_s": 7.0}

    def pause_s(self) -> float:
        return 0.25

    def close(self) -> None:
        self.told.append(("closed",))


def test_an_engine_calls_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Everything()
    monkeypatch.setattr("raycore.engine.core.make_parts", lambda *_, **__: [part])
    core = EngineCore(make_config(), FakeExecutor())
    assert core.submit(request(9)) == ["an image"]
    assert not core.has_work()
    assert core.submit(request(1, max_tokens=1)) == []
    assert core.wait_s() == 0.25
    assert core.load().decode_s == 7.0
    run_to_end(core)
    core.submit(request(2))
    core.abort([2])
    core.shutdown()
    assert part.told == [
        ("added", 1),
        ("planned", 0),
        ("done", 0),
        ("dropped", 1),
        ("added", 2),
        ("dropped", 2),
        ("closed",),
    ]
    assert core.utilities.functions["load"]() == "its own"


def test_adapters_are_a_part_of_engines_with_adapters() -> None:
    config = make_config()
    config = msgspec.structs.replace(config, lora=msgspec.structs.replace(config.lora, enable_lora=True))
    kinds = [type(part) for part in EngineCore(config, FakeExecutor()).parts]
    assert kinds == [*ALWAYS, AdapterWaits]
