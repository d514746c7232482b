"""The rows of states of a worker, for models whose layers keep states: those of slots, and those of prefixes."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raycore.config.states import StateRows
from raycore.messages import StepPlan
from raycore.step.batch import StepInputs
from simulation.worker import model
from simulation.worker.chance import Chance
from simulation.worker.numbers64 import Words
from simulation.world.kernel import pause

_ZERO = np.uint64(0)
ROW_BYTES = 16


class States:
    """Each row is two numbers, which are equal unless somebody reads a row while it is copied."""

    def __init__(self, rows: StateRows, chance: Chance) -> None:
        self._rows = rows
        self._kept = chance.garbage(rows.total, 2)
        self._first = np.zeros(rows.num_slots, np.int64)
        """By slot: after how many tokens the state in its first row is. The next rows have those after one more."""
        self._begins: dict[int, int | None] = {}
        """By slot whose request no step has had yet: the row that it begins with. None: it begins from nothing."""
        self._saves: dict[int, list[tuple[int, int]]] = {}
        """By slot: (after how many tokens, row) of the states that the step keeps."""

    @property
    def halves(self) -> NDArray[np.uint8]:
        """uint8[rows, 2, n]: a view of the two numbers of each row."""
        return self._kept.view(np.uint8).reshape(len(self._kept), 2, -1)

    def apply(self, plan: StepPlan) -> None:
        """Note what a plan says of states."""
        for request in plan.new_requests:
            self._begins[request.slot] = None
        self._saves = {}
        if plan.states is not None:
            for slot, row in _rows_of(plan.states.begins, 2):
                self._begins[slot] = row
            for slot, count, row in _rows_of(plan.states.saves, 3):
                self._saves.setdefault(slot, []).append((count, row))

    def advance(self, step: StepInputs, first_T: Words) -> Words:
        """[T]: the state after each of a step's tokens. `first_T`: their first layer."""
        made: list[Words] = []
        num_kept = np.ones_like(step.counts)
        if step.draft_ids is not None:
            num_kept = np.maximum(np.bincount(step.sampled, minlength=len(step.slots)), 1)
        row = 0
        for slot, start, count, kept in zip(
            step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), num_kept.tolist(), strict=True
        ):
            before = self._before(slot, start)
            for num_tokens, place in self._saves.get(slot, ()):
                if num_tokens <= start:
                    self._copy(self._own_row(slot, num_tokens), place)
            after = model.states_after(before, first_T[row : row + count])
            made.append(after)
            for num_tokens, place in self._saves.get(slot, ()):
                if num_tokens > start:
                    self._kept[place] = after[num_tokens - start - 1]
            self._begins.pop(slot, None)
            self._first[slot] = start + count - kept + 1
            first_row = slot * self._rows.rows_per_slot
            self._kept[first_row : first_row + kept] = after[count - kept :, None]
            row += count
        return np.concatenate(made)

    def _before(self, slot: int, start: int) -> np.uint64:
        row = self._begins[slot] if slot in self._begins else self._own_row(slot, start)
        if row is None:
            return _ZERO
        first, second = self._kept[row]
        return first if first == second else first ^ second

    def _own_row(self, slot: int, num_tokens: int) -> int:
        offset = num_tokens - int(self._first[slot])
        assert 0 <= offset < self._rows.rows_per_slot, f"slot {slot} has no state after {num_tokens} tokens"
        return slot * self._rows.rows_per_slot + offset

    def _copy(self, source: int, target: int) -> None:
        self._kept[target, 0] = self._kept[source, 0]
        pause()
        self._kept[target, 1] = self._kept[source, 1]


def _rows_of(data: bytes, width: int) -> list[list[int]]:
    return np.frombuffer(data, np.int32).reshape(-1, width).tolist()
