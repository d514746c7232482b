"""A worker's data of the running requests, in arrays indexed by slot, and how a step's plan changes them.

The data are: how many tokens are known and how many are computed, which tokens, and which blocks hold their keys and
values. A sampled token counts as known as soon as its step is planned, although the host may learn its value later.
This module depends on neither torch nor the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycore.messages import NewRequest, StepPlan

Ints = NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """The input of one step: n slots in the plan's order, and T tokens grouped by slot."""

    slots: Ints
    """[n]: the slots that the step computes."""
    counts: Ints
    """[n]: number of each slot's tokens in the step."""
    starts: Ints
    """[n]: the position in its sequence of each slot's first token in the step."""
    num_decodes: int
    """How many slots at the beginning of `slots` have one token each."""
    token_slots: Ints
    """[T]: each token's slot."""
    positions: Ints
    """[T]: each token's position in its sequence."""
    sampled: Ints
    """Indexes in `slots`, ascending, of the slots that get a new token."""
    next_positions: Ints
    """The positions in their sequences that these new tokens get."""
    generations: Ints
    """The generations of the slots that get a new token (see `SlotBatch.generation`)."""
    block_tables: NDArray[np.int32]
    """By slot: its blocks."""
    tables_version: int
    """Changes whenever a block table may have changed."""

    @property
    def is_decoding(self) -> bool:
        """Whether every row is a slot's only token, and a new token is sampled from it."""
        return 0 < len(self.sampled) == len(self.positions)

    @property
    def last_rows(self) -> Ints:
        """[n]: the index of each slot's last token among the T tokens."""
        return np.cumsum(self.counts) - 1


class SlotBatch:
    """The running requests. All arrays are indexed by slot; rows of slots without a request have no meaning."""

    def __init__(self, num_slots: int, max_model_len: int, block_size: int) -> None:
        # One column more than a sequence can have: with two plans in flight, one token may be sampled beyond the end.
        self.token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.num_known = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.generation = np.zeros(num_slots, np.int64)
        """How many requests the slot has had. A token that was sampled for an earlier one is dropped."""
        self.block_tables = np.zeros((num_slots, -(-(max_model_len + 1) // block_size)), np.int32)
        self._num_blocks = np.zeros(num_slots, np.int64)
        self._indexes = np.arange(num_slots)
        self._tables_version = 0

    def apply(self, plan: StepPlan) -> Ints:
        """Apply the plan's freed slots, new requests and new blocks, in this order.

        Returns: for each of the plan's new blocks, its index in the flat `block_tables`.
        """
        if plan.freed_slots:
            self.num_known[plan.freed_slots] = 0
        for request in plan.new_requests:
            self._add(request)
        if plan.new_requests or plan.new_block_slots:
            self._tables_version += 1
        return self._append_blocks(
            np.frombuffer(plan.new_block_slots, np.int32), np.frombuffer(plan.new_block_ids, np.int32)
        )

    def advance(self, plan: StepPlan) -> StepInputs:
        """Return the tokens that the plan computes. Count them as computed, and the tokens to be sampled as known."""
        slots = np.frombuffer(plan.slots, np.int32).astype(np.int64)
        starts = self.num_computed[slots]
        if plan.num_tokens:
            counts = np.frombuffer(plan.num_tokens, np.int32).astype(np.int64)
            token_slots = np.repeat(slots, counts)
            offsets = np.arange(len(token_slots)) - np.repeat(np.cumsum(counts) - counts, counts)
            positions = np.repeat(starts, counts) + offsets
            is_long = counts != 1
            num_decodes = int(is_long.argmax()) if is_long.any() else len(slots)
        else:
            counts, token_slots, positions, num_decodes = np.ones_like(slots), slots, starts, len(slots)
        ends = starts + counts
        known = self.num_known[slots]
        assert (ends <= known).all(), f"slots {slots[ends > known]} are planned beyond their known tokens"
        self.num_computed[slots] = ends
        is_sampled = ends == known
        if is_sampled.all():
            sampled, sampled_slots, next_positions = self._indexes[: len(slots)], slots, ends
        else:
            sampled = np.flatnonzero(is_sampled)
            sampled_slots, next_positions = slots[sampled], ends[sampled]
        self.num_known[sampled_slots] = next_positions + 1
        return StepInputs(
            slots=slots,
            counts=counts,
            starts=starts,
            num_decodes=num_decodes,
            token_slots=token_slots,
            positions=positions,
            sampled=sampled,
            next_positions=next_positions,
            generations=self.generation[sampled_slots],
            block_tables=self.block_tables,
            tables_version=self._tables_version,
        )

    def receive(self, step: StepInputs, token_ids: NDArray[np.generic]) -> None:
        """Store the tokens that a step has sampled, except for requests that have lost their slots since."""
        slots, positions = step.slots, step.next_positions
        if not step.is_decoding:
            slots = slots[step.sampled]
        is_current = self.generation[slots] == step.generations
        if not is_current.all():
            slots, positions, token_ids = slots[is_current], positions[is_current], token_ids[is_current]
        self.token_ids[slots, positions] = token_ids

    def _add(self, request: NewRequest) -> None:
        slot = request.slot
        token_ids = np.frombuffer(request.token_ids, np.int32)
        block_ids = np.frombuffer(request.block_ids, np.int32)
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.block_tables[slot, : len(block_ids)] = block_ids
        self.num_known[slot] = len(token_ids)
        self.num_computed[slot] = request.num_computed_tokens
        self.num_prompt[slot] = request.num_prompt_tokens
        self.generation[slot] += 1
        self._num_blocks[slot] = len(block_ids)

    def _append_blocks(self, slots: NDArray[np.int32], block_ids: NDArray[np.int32]) -> Ints:
        places = np.empty(len(slots), np.int64)
        for index, (slot, block_id) in enumerate(zip(slots.tolist(), block_ids.tolist(), strict=True)):
            column = self._num_blocks[slot]
            self.block_tables[slot, column] = block_id
            places[index] = slot * self.block_tables.shape[1] + column
            self._num_blocks[slot] += 1
        return places
