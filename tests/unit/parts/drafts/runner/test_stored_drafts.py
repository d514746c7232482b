"""Drafts are made on the last stage after a step, and are the same on all stages when the next one begins."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from drafts_by_slot import by_slot
from small_model import int32, new_request, plan

from raycore.messages import StepPlan
from raycore.parts.drafts.guesses.drafts import Drafts
from raycore.parts.drafts.runner.drafter import StepDrafting
from raycore.parts.drafts.runner.stored_drafts import DraftsAfterSteps, StoredDrafts
from raycore.step.batch import SlotBatch
from raycore.step.device_batch import DeviceBatch

MOST = 3


class Counting(StepDrafting):
    """Drafts as many tokens as it may: 10 times the slot, and on. Not for slot 5."""

    def __init__(self) -> None:
        self.num_results = 0

    def propose(self, slots: Any, limits: Any) -> Drafts:
        drafts = {slot: list(range(10 * slot, 10 * slot + n)) for slot, n in zip(slots, limits, strict=True)}
        drafts.pop(5, None)
        assert self.num_results, "the tokens that the drafts follow are known"
        return Drafts.of(list(drafts), list(drafts.values()))

    def result(self) -> Any:
        """As a `PendingStep`."""
        self.num_results += 1


class Links:
    """The link to the stage before."""

    def __init__(self, to: StoredDrafts) -> None:
        self._to = to
        self.slots: list[int] = []

    def send(self, tensor: torch.Tensor) -> None:
        self._to.store(np.array(self.slots), tensor.numpy())


def test_drafts_after_a_step_are_verified_in_the_next_one_of_their_slots() -> None:
    drafting, first = Counting(), StoredDrafts(8, MOST)
    link: Any = Links(first)
    last = DraftsAfterSteps(drafting, [link], DeviceBatch(SlotBatch(8, 16, 4), torch.device("cpu")), MOST)

    def step(of: StepPlan) -> list[dict[int, list[int]]]:
        """The drafts on both stages when a step begins. Then the last one drafts."""
        for stage in (first, last):
            stage.apply(of)
        found = [by_slot(stage.for_step(of)) if of.max_drafts else {} for stage in (first, last)]
        asked = np.frombuffer(of.next_drafts, np.int32)
        slots = np.frombuffer(of.slots, np.int32)[: len(asked)]
        link.slots = slots[asked > 0].tolist()
        last.launched(drafting)
        assert (first.table[:, 0] == last.table[:, 0]).all()
        return found

    assert step(plan([2, 1, 5, 4], next_drafts=int32([3, 2, 2, 0]))) == [{}, {}]
    assert step(plan([1, 4, 5], max_drafts=int32([2, 2, 2]), next_drafts=int32([1, 0, 0]))) == [{1: [10, 11]}] * 2
    assert step(plan([1, 2], max_drafts=int32([3, 1]))) == [{1: [10], 2: [20]}] * 2
    assert step(plan([1, 2], max_drafts=int32([3, 3]), next_drafts=int32([1, 1]))) == [{}, {}], "each is for one step"
    heir = new_request(1, [7], [0])
    assert step(plan([1, 2], new_requests=[heir], max_drafts=int32([1, 1]))) == [{2: [20]}] * 2
