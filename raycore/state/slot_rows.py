"""Which rows the states of a step's sequences are read from and written to. Depends on neither torch nor the model.

Every slot has some rows of its own. A step writes the state after a slot's last token to one of them. With drafts, it
also writes the states after each token from which one is sampled, one to each row. Where the slot's next step begins
then tells which of these is its state. Other rows have the states of prefixes: the plan says when they are written,
and which requests begin with them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from raycore.messages import StepPlan
from raycore.state.spec import FROM_ZERO, StateStep
from raycore.step.batch import Ints, StepInputs

_UNKNOWN = -2
"""Instead of the row that a request begins with, whose first tokens aren't computed and have no state."""
_NO_ROWS: Ints = np.zeros(0, np.int64)


class RowsOfStep(NamedTuple):
    """What a step reads and writes."""

    step: StateStep
    copies_2n: Ints
    """Rows that are copied before the step: the rows themselves, and where they are copied to."""


class SlotRows:
    """The rows of the slots of one worker."""

    def __init__(self, num_slots: int, rows_per_slot: int) -> None:
        """`rows_per_slot`: one more than a step has drafts for a slot."""
        self._rows_per_slot = rows_per_slot
        self._is_new = np.ones(num_slots, np.bool_)
        """Whether no step has had the slot's request yet."""
        self._begins = np.full(num_slots, FROM_ZERO, np.int64)
        """The row that a new request begins with."""
        self._num_tokens = np.zeros(num_slots, np.int64)
        """After how many tokens the state in the slot's first row is. Its next rows have those after one more each."""
        self._saves = _NO_ROWS, _NO_ROWS, _NO_ROWS
        """The plan's `StatePlan.saves`: slots, numbers of tokens, rows."""

    def apply(self, plan: StepPlan) -> None:
        """Note a plan's new requests, and which states are kept in its step."""
        for request in plan.new_requests:
            self._is_new[request.slot] = True
            self._begins[request.slot] = _UNKNOWN if request.num_computed_tokens else FROM_ZERO
        self._saves = _NO_ROWS, _NO_ROWS, _NO_ROWS
        if plan.states is not None:
            begins = np.frombuffer(plan.states.begins, np.int32)
            self._begins[begins[::2]] = begins[1::2]
            saves = np.frombuffer(plan.states.saves, np.int32).astype(np.int64)
            self._saves = saves[::3], saves[1::3], saves[2::3]

    def begin(self, step: StepInputs) -> RowsOfStep:
        """Return the rows of the step of the last plan. Call this once for each step that computes tokens."""
        slots, counts = step.slots, step.counts
        num_kept = np.ones_like(counts)
        """How many states of each slot are written: those after its last tokens."""
        if step.draft_ids is not None:
            num_kept = np.maximum(np.bincount(step.sampled, minlength=len(slots)), 1)
        ends = step.starts + counts
        reads = np.where(self._is_new[slots], self._begins[slots], self._rows(slots, step.starts))
        assert (reads != _UNKNOWN).all(), f"slots {slots[reads == _UNKNOWN]} begin after tokens without a state"
        copies_2n, saves_S3 = self._kept(step)
        self._is_new[slots] = False
        self._num_tokens[slots] = ends - num_kept + 1
        sequences_n4 = np.stack([step.first_rows, counts, reads, self._rows(slots, ends)], 1)
        if step.draft_ids is not None:
            saves_S3 = np.concatenate([saves_S3, self._before_drafts(slots, counts, num_kept)])
        saves_S3 = saves_S3[np.lexsort((saves_S3[:, 1], saves_S3[:, 0]))]
        made = StateStep(sequences_n4.astype(np.int32), step.num_decodes, saves_S3.astype(np.int32))
        return RowsOfStep(made, copies_2n)

    def _rows(self, slots: Ints, num_tokens: Ints) -> Ints:
        """Return the rows with the states of slots after these numbers of tokens."""
        offsets = num_tokens - self._num_tokens[slots]
        is_there = self._is_new[slots] | ((offsets >= 0) & (offsets < self._rows_per_slot))
        assert is_there.all(), f"slots {slots[~is_there]} have no state after {num_tokens[~is_there]} tokens"
        return slots * self._rows_per_slot + offsets

    def _kept(self, step: StepInputs) -> tuple[Ints, Ints]:
        """Return `RowsOfStep.copies_2n` of states that are there already, and `StateStep.saves_S3` of the others."""
        slots, num_tokens, rows = self._saves
        index_of = np.full(len(self._is_new), -1)
        index_of[step.slots] = np.arange(len(step.slots))
        indexes = index_of[slots]
        assert (indexes >= 0).all(), f"slots {slots[indexes < 0]} aren't in the step that keeps their states"
        later = num_tokens - step.starts[indexes]
        assert (later < step.counts[indexes]).all(), "a state after a slot's last token is kept by its next step"
        is_there = later <= 0
        assert not self._is_new[slots[is_there]].any(), "a request's first step can't keep the state before it"
        copies_2n = np.stack([self._rows(slots[is_there], num_tokens[is_there]), rows[is_there]])
        return copies_2n, np.stack([indexes, later, rows], 1)[~is_there]

    def _before_drafts(self, slots: Ints, counts: Ints, num_kept: Ints) -> Ints:
        """Return `StateStep.saves_S3` of the states before each slot's last token, in the slots' own rows."""
        indexes = np.repeat(np.arange(len(slots)), num_kept - 1)
        offsets = np.arange(len(indexes)) - np.repeat(np.cumsum(num_kept - 1) - (num_kept - 1), num_kept - 1)
        rows = slots[indexes] * self._rows_per_slot + offsets
        return np.stack([indexes, (counts - num_kept + 1)[indexes] + offsets, rows], 1)
