"""Masked steps: when their masks are made and sent, and what waits for that."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from waiting import LONG_S

from raycore.engine.masked_steps import MaskedSteps
from raycore.messages import GrammarOutput, StepPlan, StepResult


class Masks:
    def __init__(self, told: list[Any], due: set[int]) -> None:
        self.told, self.due = told, due

    def is_due(self, step: int) -> bool:
        return step in self.due

    def make(self, step: int) -> GrammarOutput:
        self.told.append(f"make {step}")
        return GrammarOutput(b"", b"", str(step).encode())


class Workers:
    """An executor whose results are there when the masks are."""

    def __init__(self, told: list[Any]) -> None:
        self.told = told

    def execute(self, plan: StepPlan) -> Any:
        self.told.append(f"execute {plan.step}")
        return None

    def sample_tokens(self, step: Any, grammar: GrammarOutput) -> Any:
        assert step is None
        self.told.append(f"sample {grammar.bitmask.decode()}")
        return Arrived(int(grammar.bitmask))


class Arrived:
    def __init__(self, step: int) -> None:
        self.step = step

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> StepResult:
        return StepResult(self.step)


def masked_steps(due: set[int]) -> tuple[MaskedSteps, list[Any]]:
    told: list[Any] = []
    executor: Any = Workers(told)
    return MaskedSteps(executor, Masks(told, due)), told


def test_masks_of_known_tokens_are_sent_with_the_plan() -> None:
    steps, told = masked_steps({4})
    pending = steps.execute(StepPlan(4, masked=True))
    assert sorted(told[:2]) == ["execute 4", "make 4"]
    assert told[2:] == ["sample 4"]
    assert not steps.is_deferred
    assert pending.result() == StepResult(4)


def test_masks_are_made_while_workers_compute() -> None:
    """An executor that computes in its caller's thread waits for the masks here, and has them."""
    steps, told = masked_steps({4})
    made = threading.Event()
    make, execute = steps._masks.make, steps._executor.execute  # pyright: ignore

    def note(step: int) -> GrammarOutput:
        made.set()
        return make(step)

    def compute(plan: StepPlan) -> Any:
        assert made.wait(LONG_S), "masks are made before the workers have computed"
        return execute(plan)

    steps._masks.make, steps._executor.execute = note, compute  # pyright: ignore
    steps.execute(StepPlan(4, masked=True))
    assert told[-1] == "sample 4"


def test_masks_that_follow_a_token_in_flight_are_sent_when_it_has_arrived() -> None:
    due: set[int] = set()
    steps, told = masked_steps(due)
    pending = steps.execute(StepPlan(4, masked=True))
    assert told == ["execute 4"]
    assert steps.is_deferred, "no other step may begin"
    steps.go_on()
    assert (told, steps.is_deferred) == (["execute 4"], True), "another token has arrived"
    due.add(4)
    steps.go_on()
    steps.go_on()
    assert told == ["execute 4", "make 4", "sample 4"]
    assert not steps.is_deferred
    assert pending.done()
    assert pending.result() == StepResult(4)


def test_what_fails_while_masks_are_made_is_raised() -> None:
    steps, _ = masked_steps({4})

    def fail(step: int) -> GrammarOutput:
        raise RuntimeError("no mask")

    steps._masks.make = fail  # pyright: ignore
    with pytest.raises(RuntimeError, match="no mask"):
        steps.execute(StepPlan(4, masked=True))


def test_an_engine_without_masks_has_none_to_send() -> None:
    steps = MaskedSteps(Workers([]), None)  # pyright: ignore[reportArgumentType]
    steps.go_on()
    assert not steps.is_deferred
