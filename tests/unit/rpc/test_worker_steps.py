"""Steps on workers of all kinds: those that sample in a call of their own, and those that don't."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.rpc.worker_steps import WorkerSteps, samples_apart, takes_masks

MASKS = GrammarOutput(np.int32([3]).tobytes(), np.int32([7]).tobytes(), b"mask")


class Noting:
    def __init__(self) -> None:
        self.calls: list[Any] = []


class OneCall(Noting):
    """A worker of the user's that samples as it computes, and follows grammars itself."""

    def execute_model(self, plan: StepPlan) -> StepResult:
        self.calls.append(("execute_model", plan.step, plan.masked, plan.grammar))
        return StepResult(plan.step)


class TwoCalls(Noting):
    """One that never samples in `execute_model`."""

    def execute_model(self, plan: StepPlan) -> None:
        self.calls.append(("execute_model", plan.step, plan.masked, plan.grammar))
        self.plan = plan

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        self.calls.append(("sample_tokens", grammar))
        return StepResult(self.plan.step)


class OwnExecute(TwoCalls):
    """A subclass that does something with the result of each step."""

    def execute_model(self, plan: StepPlan) -> Any:
        super().execute_model(plan)
        return StepResult(plan.step + 100)


class OwnBoth(OwnExecute):
    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        return super().sample_tokens(grammar)


class NeverSamples(TwoCalls):
    """One that has the result before the masks come, as a stage that samples nothing may."""

    def execute_model(self, plan: StepPlan) -> Any:
        super().execute_model(plan)
        return StepResult(plan.step)

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
        raise AssertionError("there is a result")


def test_a_worker_that_samples_apart_gets_the_masks_after_the_plan() -> None:
    worker = TwoCalls()
    steps = WorkerSteps(worker)
    assert steps.execute(StepPlan(5, masked=True)) is None
    assert worker.calls == [("execute_model", 5, True, None)], "it computes before the masks come"
    assert steps.is_masked
    assert steps.sample(MASKS) == StepResult(5)
    assert worker.calls[1:] == [("sample_tokens", MASKS)]
    assert not steps.is_masked


def test_a_worker_that_samples_apart_samples_at_once_if_there_are_no_masks() -> None:
    worker = TwoCalls()
    assert WorkerSteps(worker).execute(StepPlan(5)) == StepResult(5)
    assert worker.calls == [("execute_model", 5, False, None), ("sample_tokens", None)]


@pytest.mark.parametrize("kind", [OneCall, OwnExecute])
def test_a_worker_that_samples_in_execute_model_gets_plan_and_masks_together(kind: type[Noting]) -> None:
    worker = kind()
    steps = WorkerSteps(worker)
    assert steps.execute(StepPlan(5, masked=True)) is None
    assert worker.calls == []
    result = steps.sample(MASKS)
    assert worker.calls == [("execute_model", 5, False, MASKS)]
    assert result == StepResult(105 if kind is OwnExecute else 5)
    assert steps.execute(StepPlan(6)) == StepResult(106 if kind is OwnExecute else 6)


def test_a_result_that_comes_before_the_masks_is_kept() -> None:
    steps = WorkerSteps(NeverSamples())
    assert steps.execute(StepPlan(5, masked=True)) is None
    assert steps.sample(MASKS) == StepResult(5)
    assert steps.execute(StepPlan(6)) == StepResult(6)


def test_an_execute_model_that_was_put_into_a_worker_samples() -> None:
    worker = TwoCalls()
    worker.execute_model = lambda plan: StepResult(plan.step + 1)  # pyright: ignore[reportAttributeAccessIssue]
    steps = WorkerSteps(worker)
    steps.execute(StepPlan(5, masked=True))
    assert steps.sample(MASKS) == StepResult(6)


def test_a_step_that_has_failed_waits_for_no_masks() -> None:
    class Fails(TwoCalls):
        def execute_model(self, plan: StepPlan) -> None:
            raise ValueError("no step")

        def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult:
            raise AssertionError("nothing was computed")

    steps = WorkerSteps(Fails())
    with pytest.raises(ValueError, match="no step"):
        steps.execute(StepPlan(5, masked=True))
    assert not steps.is_masked


def test_who_samples_apart_is_decided_by_the_class_that_comes_first() -> None:
    kinds = [OneCall, TwoCalls, OwnExecute, OwnBoth, Noting]
    assert [samples_apart(kind()) for kind in kinds] == [False, True, False, True, False]
    assert [takes_masks(kind()) for kind in kinds] == [False, True, True, True, False]
