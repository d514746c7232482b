"""Drafts that are made after a step, for the next one of its requests: those of a model, with several stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from raycore.decoder.network import Taps
from raycore.messages import StepPlan
from raycore.parallel.links import Link
from raycore.parts.drafts.guesses.drafts import Drafts
from raycore.parts.drafts.runner.drafter import StepDrafting
from raycore.profile_session import ProfiledParts
from raycore.runner.part import PendingStep, StepExtra
from raycore.step.batch import Ints, StepInputs
from raycore.step.device_batch import DeviceBatch, StepTensors


class StoredDrafts(StepDrafting):
    """The drafts of a stage before the last one, which makes them."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        """`max_tokens`: maximum length of a draft."""
        self.table = np.zeros((num_slots, 1 + max_tokens), np.int32)
        """By slot: the length of its draft, and the draft."""

    def apply(self, plan: StepPlan) -> None:
        for request in plan.new_requests:
            self.table[request.slot, 0] = 0

    def store(self, slots: Ints, drafts: NDArray[np.int32]) -> None:
        self.table[slots] = drafts

    def propose(self, slots: Ints, limits: Ints) -> Drafts:
        """Return the drafts that there are. Each is for one step."""
        lengths = np.minimum(self.table[slots, 0], limits)
        found = Drafts(slots, lengths, self.table[slots, 1:]).shortened(lengths)
        self.table[slots, 0] = 0
        return found


class DraftsAfterSteps(StoredDrafts):
    """Makes the drafts on the last stage, after each step, and sends them to the stages before."""

    def __init__(self, drafting: StepDrafting, links: Sequence[Link], batch: DeviceBatch, max_tokens: int) -> None:
        """
        Args:
            drafting: what drafts.
            links: to the stages before.
        """
        super().__init__(len(batch.host.num_known), max_tokens)
        self._drafting = drafting
        self._links = links
        self._device = batch.device
        self._asked: tuple[Ints, Ints] = np.zeros(0, np.int64), np.zeros(0, np.int64)
        """The slots of the step that get drafts after it, and their maximum lengths."""

    def apply(self, plan: StepPlan) -> None:
        super().apply(plan)
        self._drafting.apply(plan)
        limits = np.frombuffer(plan.next_drafts, np.int32).astype(np.int64)
        slots = np.frombuffer(plan.slots, np.int32).astype(np.int64)[: len(limits)]
        self._asked = slots[limits > 0], limits[limits > 0]

    def launched(self, step: PendingStep) -> None:
        """Draft, once it is known which tokens the step's requests get."""
        super().launched(step)
        slots, limits = self._asked
        if not len(slots):
            return
        self.catch_up()
        order = np.argsort(slots)
        drafts = self._drafting.propose(slots[order], limits[order])
        self.table[slots, 0] = 0
        width = drafts.padded_ids.shape[1]
        self.table[drafts.slots, 0], self.table[drafts.slots, 1 : 1 + width] = drafts.lengths, drafts.padded_ids
        sent = torch.as_tensor(self.table[slots], device=self._device)
        for link in self._links:
            link.send(sent)

    def draft(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        return self._drafting.draft(slots, num_tokens)

    def wants_all_rows(self, step: StepInputs) -> bool:
        return self._drafting.wants_all_rows(step)

    def taps(self, step: StepInputs) -> Taps:
        return self._drafting.taps(step)

    def end_forward(self, step: StepInputs, tensors: StepTensors, extras: list[StepExtra]) -> None:
        self._drafting.end_forward(step, tensors, extras)

    def received(self, step: StepInputs, rows: Ints) -> None:
        self._drafting.received(step, rows)

    def parts(self) -> ProfiledParts:
        yield from self._drafting.parts()
