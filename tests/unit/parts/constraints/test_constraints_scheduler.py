"""A request waits for its last token if a rule of its own needs it, and otherwise doesn't. Masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from counted_grammar import Counted
from fake_engine_core import VOCAB, FakeEngineCore

from raycore.errors import InvalidRequest
from raycore.messages import GrammarOutput, StepPlan, StepResult, ThinkingLimit
from raycore.parts.constraints.grammar.matcher import mask_bytes
from raycore.parts.constraints.scheduler import GrammarMasks
from raycore.structured_outputs import StructuredOutputsParams

RULES: list[dict[str, Any]] = [
    {"structured_outputs": StructuredOutputsParams(regex="a+")},
    {"thinking": ThinkingLimit(5, [2], [3], [3])},
    {"bad_words_token_ids": [[4], [5, 6]]},
]


@pytest.mark.parametrize("options", RULES)
def test_the_next_token_is_planned_when_the_last_one_has_arrived(options: dict[str, Any]) -> None:
    assert num_plans_in_flight(**options) == 1


@pytest.mark.parametrize("options", [{}, {"bad_words_token_ids": [[4], [5]]}, {"min_tokens": 2}])
def test_a_request_without_such_a_rule_does_not_wait(options: dict[str, Any]) -> None:
    assert num_plans_in_flight(**options) == 2


def num_plans_in_flight(**options: Any) -> int:
    """How many steps are planned of a request before the first result arrives, if two may be in flight."""
    engine = FakeEngineCore()
    engine.submit([1, 2, 3], max_tokens=8, **options)
    return sum(engine.scheduler.schedule() is not None for _ in range(2))


class Compiler:
    def __init__(self) -> None:
        self.num_made = 0

    def matcher_of(self, asked: StructuredOutputsParams, stop_token_ids: Any = ()) -> Counted:
        if asked.regex == "(":
            raise InvalidRequest("structured_outputs: unclosed group")
        self.num_made += 1
        return Counted()


CONSTRAINED = {"structured_outputs": StructuredOutputsParams(regex="count")}


class Engine:
    """A scheduler with masks, whose results the test makes."""

    def __init__(self, **options: Any) -> None:
        self.compiler: Any = Compiler()
        self.masks = GrammarMasks(self.compiler, VOCAB)
        self.core = FakeEngineCore(masks=self.masks, **options)
        self.submit, self.scheduler = self.core.submit, self.core.scheduler

    def plan(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def give(self, plan: StepPlan, *tokens: list[int]) -> Any:
        """Apply a result with these tokens of each slot of the plan."""
        flat = [token for own in tokens for token in own]
        counts = np.array([len(own) for own in tokens], np.int32)
        return self.scheduler.update(plan, StepResult(plan.step, np.int32(flat).tobytes(), counts.tobytes()))


def tokens_of(masks: GrammarOutput) -> dict[tuple[int, int], list[int]]:
    """The tokens that may come, by slot and position."""
    slots, positions = np.frombuffer(masks.slots, np.int32).tolist(), np.frombuffer(masks.positions, np.int32).tolist()
    bits = np.unpackbits(
        np.frombuffer(masks.bitmask, np.uint8).reshape(len(slots), mask_bytes(VOCAB)), axis=1, bitorder="little"
    )
    return {
        key: np.flatnonzero(own).tolist() for key, own in zip(zip(slots, positions, strict=True), bits, strict=True)
    }


def test_only_steps_with_new_tokens_of_constrained_requests_are_masked() -> None:
    engine = Engine(max_num_batched_tokens=4)
    engine.submit([1, 2, 3], max_tokens=8)
    free = engine.plan()
    assert not free.masked
    engine.give(free, [9])
    engine.submit([1, 2, 3, 4, 5], max_tokens=8, **CONSTRAINED)
    chunk = engine.plan()
    assert not chunk.masked, "nothing is sampled after the first part of a prompt"
    engine.give(chunk, [9], [])
    last = engine.plan()
    assert last.masked
    assert engine.masks.is_due(last.step)
    ((key, tokens),) = tokens_of(engine.masks.make(last.step)).items()
    assert key[1] == 5, "its first token comes after its prompt"
    assert tokens == [1]


def test_masks_wait_for_the_token_in_flight() -> None:
    engine = Engine()
    engine.submit([7, 7], max_tokens=8, **CONSTRAINED)
    first, second = engine.plan(), engine.plan()
    assert (engine.masks.is_due(first.step), engine.masks.is_due(second.step)) == (True, False)
    assert list(tokens_of(engine.masks.make(first.step)).values()) == [[1]]
    engine.give(first, [1])
    assert engine.masks.is_due(second.step)
    assert tokens_of(engine.masks.make(second.step)) == {(0, 3): [2]}
    assert engine.compiler.num_made == 1


@pytest.mark.parametrize("is_aborted", [True, False])
def test_a_request_that_has_left_needs_no_mask(is_aborted: bool) -> None:
    engine = Engine()
    seq_ids = [engine.submit([7, 7], max_tokens=8, **CONSTRAINED) for _ in range(2)]
    first, second = engine.plan(), engine.plan()
    if is_aborted:
        engine.scheduler.abort([seq_ids[0]])
    else:
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.give(first, [1], [1])
    assert engine.masks.is_due(second.step)
    found = tokens_of(engine.masks.make(second.step))
    assert list(found.values()) == ([[2]] if is_aborted else [])
    engine.give(second, [2], [2])
    engine.scheduler.check_integrity()
    if not is_aborted:
        again = engine.plan()
        assert sorted(tokens_of(engine.masks.make(again.step)).values()) == [[1], [1]], "their tokens were dropped"


def test_requests_that_break_their_grammar_fail_and_others_go_on() -> None:
    engine = Engine()
    engine.submit([7, 7], max_tokens=8, **CONSTRAINED)
    engine.submit([7, 7], max_tokens=8, **CONSTRAINED)
    engine.submit([7, 7], max_tokens=8, structured_outputs=StructuredOutputsParams(regex="("))
    plan = engine.plan()
    assert list(tokens_of(engine.masks.make(plan.step)).values()) == [[1], [1]]
    outputs = engine.give(plan, [1], [5], [1])
    assert [(end.finish_reason, end.stop_reason) for end in outputs.finished] == [
        ("failed", "structured_outputs: unclosed group")
    ]
    plan = engine.plan()
    assert list(tokens_of(engine.masks.make(plan.step)).values()) == [[2]]
    outputs = engine.give(plan, [2], [2])
    assert [end.stop_reason for end in outputs.finished] == ["[5] isn't counted"]
    assert engine.masks._steps == {}
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("num_right", [0, 1])
def test_a_failure_after_a_wrong_draft_is_none(num_right: int) -> None:
    """The mask after draft 3 says that only 4 may come; what the model drafts there can't be followed."""
    engine = Engine()
    engine.submit([7, 7], max_tokens=8, **CONSTRAINED)
    plan = engine.plan()
    engine.masks.make(plan.step)
    engine.masks._steps[plan.step].failed.append((0, 2 + num_right, "it fails"))
    outputs = engine.give(plan, [1])
    assert [end.stop_reason for end in outputs.finished] == ["it fails"] * (num_right == 0)
