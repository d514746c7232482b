"""How many drafts workers are asked for: as many as pay by what results say, and now and then a few."""

from __future__ import annotations

from typing import Any

import numpy as np

from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.scheduler.worker_drafts import WorkerDrafts

SLOTS = np.arange(3)
MOST = 4


def asked(drafts: WorkerDrafts, limits: int = 50, budget: int = 500, num_other: int = 0) -> list[int]:
    """How many drafts each slot may have in the next step."""
    running: Any = None  # only workers know the tokens
    found = drafts.propose(SLOTS, running, np.full(len(SLOTS), limits), budget, num_other)
    lengths = np.zeros(len(SLOTS), np.int64)
    lengths[found.slots] = found.lengths
    return lengths.tolist()


def run(drafts: WorkerDrafts, num_steps: int, *, are_right: bool, draft_s: float) -> list[list[int]]:
    """Run steps of a second, and of `draft_s` more for each token of the longest draft. Returns what was asked."""
    found: list[list[int]] = []
    for _ in range(num_steps):
        found.append(asked(drafts))
        lengths = np.array(found[-1])
        num_right = lengths if are_right else np.zeros_like(lengths)
        drafts.count(SLOTS[lengths > 0], lengths[lengths > 0], num_right[lengths > 0])
        drafts.learn(SLOTS[lengths > 0], lengths[lengths > 0], num_right[lengths > 0])
        drafts.observe(len(SLOTS), False, 1.0 + draft_s * float(lengths.max()))
    return found


def make(**settings: Any) -> WorkerDrafts:
    return WorkerDrafts(SpeculativeConfig("ngram", MOST, **settings), len(SLOTS))


def test_right_drafts_have_the_longest_allowed_length() -> None:
    drafts = make()
    assert run(drafts, 50, are_right=True, draft_s=0.01)[-1] == [MOST] * 3
    assert drafts.stats.num_draft_tokens == sum(drafts.stats.accepted_per_position) > 100
    assert asked(drafts, limits=2) == [2, 2, 2]
    assert sum(asked(drafts, budget=5)) <= 5
    assert asked(drafts, num_other=3 * MOST + 1) == [0, 0, 0], "a long prompt's chunk has no drafts beside it"


def test_wrong_drafts_are_given_up_and_tried_again() -> None:
    drafts = make()
    found = run(drafts, 300, are_right=False, draft_s=0.05)
    assert sum(any(lengths) for lengths in found[100:]) < 20
    assert [2, 2, 2] in found[100:], "a trial is short"
    assert run(drafts, 600, are_right=True, draft_s=0.05)[-1] == [MOST] * 3, "they have been noticed to be right"


def test_drafts_that_take_too_long_to_make_are_given_up() -> None:
    found = run(make(), 200, are_right=True, draft_s=2.0)
    assert sum(any(lengths) for lengths in found[100:]) < 10


def test_a_given_number_is_asked_for_whether_it_pays_or_not() -> None:
    drafts = make(num_speculative_tokens_per_batch_size=[(1, 2, 4), (3, 3, 1)])
    assert all(lengths == [1, 1, 1] for lengths in run(drafts, 50, are_right=False, draft_s=9.0))
    none = make(num_speculative_tokens_per_batch_size=[(1, 2, 4), (3, 3, 0)])
    assert not any(map(any, run(none, 50, are_right=True, draft_s=0.0))), "not even for a trial"
