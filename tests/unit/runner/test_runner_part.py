"""Every part of a runner keeps the contract: its hooks have the contract's names and parameters, and no others."""

from __future__ import annotations

import inspect
from collections.abc import Container
from typing import Any

import pytest
from small_model import BLOCK_SIZE, NUM_BLOCKS, make_runner, new_request, plan, tokens_of

from raycore.messages import StepPlan, StepResult, TokenReport
from raycore.parts.drafts.runner.drafter import NO_DRAFTER, Drafter, Drafting, StepDrafting
from raycore.parts.drafts.runner.stage_states import ReadStage
from raycore.parts.drafts.runner.stored_drafts import DraftsAfterSteps, StoredDrafts
from raycore.parts.drafts.runner.token_guesses import SharedDrafts, TokenGuesses
from raycore.parts.images.worker import NoTexts
from raycore.parts.pooling.runner import PoolingHead
from raycore.parts.routed_experts.worker import AllRowsToo, ChosenExperts
from raycore.runner.heads import Head, NextStage
from raycore.runner.part import PlanFollower, RunnerPart, StepExtra
from raycore.runner.sampling_head import SamplingHead
from raycore.runner.sources import Source, StageBefore, Tokens, TokensWithImages
from raycore.runner.step_parts import AdaptedRows, Lockstep, ReturnedTokens

BASES: list[type] = [RunnerPart, Source, Head, Drafting, StepDrafting]
PARTS: list[type[RunnerPart]] = [
    *(AdaptedRows, Drafter, PlanFollower, Lockstep, NextStage, PoolingHead, ReturnedTokens, SamplingHead, StageBefore),
    *(DraftsAfterSteps, NoTexts, ReadStage, StoredDrafts),
    *(AllRowsToo, ChosenExperts, SharedDrafts, TokenGuesses, Tokens, TokensWithImages),
]


def own_functions(part: type) -> dict[str, Any]:
    return {name: each for name, each in vars(part).items() if inspect.isfunction(each) and not name.startswith("_")}


def subclasses(part: type) -> set[type]:
    return {each for own in part.__subclasses__() for each in (own, *subclasses(own))}


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(each.name, each.kind) for each in inspect.signature(function).parameters.values()]


def test_all_parts_are_tested() -> None:
    in_raycore = {each for each in subclasses(RunnerPart) if each.__module__.startswith("raycore.")}
    assert in_raycore - set(BASES) == set(PARTS)


@pytest.mark.parametrize("part", PARTS)
def test_public_methods_are_hooks_with_the_contracts_parameters(part: type[RunnerPart]) -> None:
    hooks: dict[str, Any] = {}
    for base in BASES:
        if issubclass(part, base):
            hooks |= own_functions(base)
    own = own_functions(part)
    assert own.keys() & hooks.keys(), "it does something"
    for name in own.keys() & hooks.keys():
        assert parameters(own[name]) == parameters(hooks[name]), name
    others = {"count"} if part is Lockstep else set[str]()
    assert own.keys() - hooks.keys() == others


class Noting(RunnerPart):
    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def catch_up(self) -> None:
        self.calls.append(("catch_up", len(self.calls)))

    def apply(self, plan: StepPlan) -> None:
        self.calls.append(("apply", plan.step))

    def begin(self, plan: StepPlan, step: Any, tensors: Any, result: StepResult) -> None:
        self.calls.append(("begin", len(step.positions)))

    def wants_all_rows(self, step: Any) -> bool:
        self.calls.append(("wants_all_rows", len(step.positions)))
        return False

    def begin_forward(self, step: Any, tensors: Any) -> None:
        self.calls.append(("begin_forward", len(step.positions)))

    def taps(self, step: Any) -> Any:
        return {1: lambda hidden_TD: self.calls.append(("layer", len(hidden_TD)))}

    def end_forward(self, step: Any, tensors: Any, extras: list[StepExtra]) -> None:
        self.calls.append(("end_forward", len(step.sampled)))
        extras.append(self)

    def add_to(self, result: StepResult, step: Any, kept: Container[int]) -> None:
        """As a `StepExtra`: report the step's first position, and whether its first new token is kept."""
        result.reports.append((0, TokenReport("noting", int(step.starts[0]), 1, bytes([0 in kept]))))

    def launched(self, step: Any) -> None:
        self.calls.append(("launched", len(step.step.sampled)))

    def received(self, step: Any, rows: Any) -> None:
        self.calls.append(("received", int(rows[-1])))

    def finish(self) -> None:
        self.calls.append(("finish", 0))


def test_hooks_are_called_in_their_order() -> None:
    runner, part = make_runner(), Noting()
    runner._own_parts.insert(0, part)
    runner.run_alone()  # binds hooks anew
    expected = make_runner()
    request = new_request(0, [5, 80, 33], list(range(NUM_BLOCKS // BLOCK_SIZE)))
    plans = [plan([0], [3], new_requests=[request]), plan([0]), StepPlan(7, freed_slots=[0])]
    reports: list[list[tuple[int, TokenReport]]] = []
    for each in plans:
        result = runner.execute(each)
        assert tokens_of(result) == tokens_of(expected.execute(each))
        reports.append(result.reports)
    runner.finish()
    steps = [
        [
            *(("catch_up", num_before), ("apply", 0), ("begin", n), ("wants_all_rows", n), ("begin_forward", n)),
            *(("layer", n), ("end_forward", 1), ("launched", 1), ("received", n - 1)),
        ]
        for n, num_before in ((3, 0), (1, 9))
    ]
    assert reports == [[(0, TokenReport("noting", first, 1, b"\x01"))] for first in (0, 3)] + [[]]
    without_tokens = [("catch_up", 18), ("apply", 7), ("begin", 0), ("launched", 0)]
    assert part.calls == [*steps[0], *steps[1], *without_tokens, ("finish", 0)]


def test_a_runner_that_does_not_draft_returns_no_drafts() -> None:
    assert make_runner().take_draft_token_ids([0], [2]) == []
    assert NO_DRAFTER.draft([0], [1]) == []
