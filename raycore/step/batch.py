"""A worker's data of the running requests, in arrays indexed by slot, and how a step's plan changes them.

The data are: how many tokens are known and how many are computed, which tokens, and which blocks hold their keys and
values. A sampled token counts as known as soon as its step is planned, although the host may learn its value later.
This module depends on neither torch nor the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raycore.messages import NO_ADAPTER, NewRequest, StepPlan
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.step.features import SlotFeatures, StepFeatures

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
    """[R]: for each new token, the index in `slots` of its slot, ascending."""
    sampled_rows: Ints
    """[R]: the index among the T tokens of the token that the new one follows."""
    next_positions: Ints
    """[R]: the position in its sequence that the new token gets."""
    draft_ids: Ints | None
    """[R]: the draft at the new token's position, or -1: then there is none, and the new token is its slot's last one.
    None: the step has no drafts."""
    generations: Ints
    """[R]: the generation of its slot (see `SlotBatch.generation`)."""
    block_tables: NDArray[np.int32]
    """By slot: its blocks, of the only group of the cache or of the first one."""
    tables_version: int
    """Changes whenever a block table may have changed."""
    group_tables: NDArray[np.int32] | None = None
    """By group of the cache and slot: its blocks. None: there is only one group."""
    features: StepFeatures | None = None
    """What images mean for the tokens. None: prompts of this model are texts."""

    @property
    def is_decoding(self) -> bool:
        """Whether every row is a slot's only token, and a new token is sampled from it."""
        return 0 < len(self.sampled) == len(self.positions) == len(self.slots)

    @property
    def num_keys(self) -> int:
        """How many tokens' keys and values attention reads in a layer."""
        return int(self.starts.sum()) + len(self.positions)

    @property
    def sampled_slots(self) -> Ints:
        """[R]: the slot of each new token."""
        return self.slots if self.is_decoding else self.slots[self.sampled]

    @property
    def num_drafts(self) -> Ints:
        """[n]: the number of each slot's drafts."""
        return np.maximum(np.bincount(self.sampled, minlength=len(self.slots)) - 1, 0)

    @property
    def first_rows(self) -> Ints:
        """[n]: the index of each slot's first token among the T tokens."""
        if len(self.positions) == len(self.slots):
            return np.arange(len(self.slots))
        return np.cumsum(self.counts) - self.counts

    @property
    def last_rows(self) -> Ints:
        """[n]: the index of each slot's last token among the T tokens."""
        return np.cumsum(self.counts) - 1


class SlotBatch:
    """The running requests. All arrays are indexed by slot; rows of slots without a request have no meaning."""

    def __init__(
        self,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_groups: int = 1,
        features: SlotFeatures | None = None,
    ) -> None:
        """
        Args:
            num_groups: number of groups of the KV cache, each with blocks of its own for every request.
            features: the images of requests. None: prompts of this model are texts.
        """
        self._features = features
        # One column more than a sequence can have: with two plans in flight, one token may be sampled beyond the end.
        self.token_ids = np.zeros((num_slots, max_model_len + 1), np.int32)
        self.num_known = np.zeros(num_slots, np.int64)
        self.num_computed = np.zeros(num_slots, np.int64)
        self.num_prompt = np.zeros(num_slots, np.int64)
        self.generation = np.zeros(num_slots, np.int64)
        """How many requests the slot has had. A token that was sampled for an earlier one is dropped."""
        self.adapter = np.full(num_slots, NO_ADAPTER, np.int64)
        """By slot: the adapter slot of its request, or `NO_ADAPTER`."""
        self.group_tables = np.zeros((num_groups, num_slots, -(-(max_model_len + 1) // block_size)), np.int32)
        """By group and slot: its blocks. Those that no token sees any more may be other requests'."""
        self.block_tables = self.group_tables[0]
        """By slot: its blocks of the first group."""
        self._num_blocks = np.zeros(num_slots, np.int64)
        self._indexes = np.arange(num_slots)
        self._ones = np.ones(num_slots, np.int64)
        self._ones.flags.writeable = False  # steps in flight share it
        self._slot_bytes, self._slots = b"", np.empty(0, np.int64)
        """The slots of the last plan. Most plans have those of the plan before, and their steps get the same array."""
        self._tables_version = 0

    @property
    def num_blocks(self) -> Ints:
        """[S]: number of each slot's blocks in each group."""
        return self._num_blocks

    def apply(self, plan: StepPlan) -> Ints:
        """Apply the plan's freed slots, new requests and new blocks, in this order.

        Returns: for each entry of the plan's new blocks, its index in the flat block tables of a group.
        """
        if plan.freed_slots:
            self.num_known[plan.freed_slots] = 0
        for request in plan.new_requests:
            self._add(request)
        if self._features is not None:
            self._features.apply(plan)
        if plan.new_requests or plan.new_block_slots:
            self._tables_version += 1
        if not plan.new_block_slots:
            return self._indexes[:0]
        return self._append_blocks(np.frombuffer(plan.new_block_slots, np.int32), plan.new_block_ids)

    def advance(self, plan: StepPlan, drafts: Drafts = NO_DRAFTS) -> StepInputs:
        """Return the tokens that the plan computes. Count them as computed, and the tokens to be sampled as known.

        `drafts`: those that the worker adds, as the plan's `max_drafts` asks.
        """
        if plan.slots != self._slot_bytes:
            self._slot_bytes, self._slots = plan.slots, np.frombuffer(plan.slots, np.int32).astype(np.int64)
        slots = self._slots
        told = plan.tokens
        starts = self.num_computed[slots] if told is None else np.frombuffer(told.starts, np.int32).astype(np.int64)
        counts = self._ones[: len(slots)]
        if plan.num_tokens:
            counts = np.frombuffer(plan.num_tokens, np.int32).astype(np.int64)
        num_drafts = self._add_drafts(slots, drafts) if len(drafts) else None
        if num_drafts is not None:
            counts = counts + num_drafts
        if plan.num_tokens or num_drafts is not None:
            token_slots = np.repeat(slots, counts)
            positions = np.repeat(starts, counts) + counted(counts)
            is_long = counts != 1
            num_decodes = int(is_long.argmax()) if is_long.any() else len(slots)
        else:
            token_slots, positions, num_decodes = slots, starts, len(slots)
        ends = starts + counts
        self.num_computed[slots] = ends
        draft_ids = None
        if num_drafts is not None:
            is_sampled = ends == self.num_known[slots] + num_drafts
            sampled, sampled_rows = _told_rows(counts, np.where(is_sampled, 1 + num_drafts, 0))
            draft_ids = _drafts(sampled, sampled_rows, self.token_ids[token_slots, positions])
        elif told is None:
            sampled, sampled_rows = self._after_known(slots, counts, ends, len(positions))
        else:
            token_ids = np.frombuffer(told.token_ids, np.int32)
            self.token_ids[token_slots, positions] = token_ids
            sampled, sampled_rows = _told_rows(counts, np.frombuffer(told.num_sampled, np.int32).astype(np.int64))
            draft_ids = _drafts(sampled, sampled_rows, token_ids)
        step = StepInputs(
            slots=slots,
            counts=counts,
            starts=starts,
            num_decodes=num_decodes,
            token_slots=token_slots,
            positions=positions,
            sampled=sampled,
            sampled_rows=sampled_rows,
            next_positions=positions[sampled_rows] + 1,
            draft_ids=draft_ids,
            generations=self.generation[slots[sampled]],
            block_tables=self.block_tables,
            tables_version=self._tables_version,
            group_tables=self.group_tables,
        )
        if self._features is not None:
            step.features = self._features.of(slots, starts, counts, token_slots, positions)
        self.num_known[step.sampled_slots] = step.next_positions + 1
        return step

    def receive(self, step: StepInputs, token_ids: NDArray[np.generic]) -> None:
        """Store the tokens that a step has sampled, except for requests that have lost their slots since."""
        slots, positions = step.sampled_slots, step.next_positions
        is_current = self.is_current(step)
        if not is_current.all():
            slots, positions, token_ids = slots[is_current], positions[is_current], token_ids[is_current]
        self.token_ids[slots, positions] = token_ids

    def is_current(self, step: StepInputs) -> NDArray[np.bool_]:
        """[R]: for each token that the step samples, whether its request still has its slot."""
        return self.generation[step.sampled_slots] == step.generations

    def drop_drafts(self, step: StepInputs, num_new: Ints) -> None:
        """Count the drafts of a step that were wrong neither as known nor as computed. Requests that have lost their
        slots since don't matter.

        `num_new`: [n]: the number of each slot's new tokens.
        """
        last_rows = np.searchsorted(step.sampled, np.flatnonzero(num_new)) + num_new[num_new > 0] - 1
        last_rows = last_rows[self.is_current(step)[last_rows]]
        slots, positions = step.sampled_slots[last_rows], step.next_positions[last_rows]
        self.num_computed[slots] = positions
        self.num_known[slots] = positions + 1

    def _add_drafts(self, slots: Ints, drafts: Drafts) -> Ints:
        """Store drafts after the known tokens. Returns how many there are, for each of the step's `slots`."""
        self.token_ids[self.places_of(drafts)] = drafts.token_ids
        lengths = np.zeros_like(self.num_known)
        lengths[drafts.slots] = drafts.lengths
        return lengths[slots]

    def places_of(self, drafts: Drafts) -> tuple[Ints, Ints]:
        """Return the slot of each token of drafts, and its position after the known tokens."""
        owners = np.repeat(drafts.slots, drafts.lengths)
        return owners, self.num_known[owners] + drafts.offsets

    def _after_known(self, slots: Ints, counts: Ints, ends: Ints, num_tokens: int) -> tuple[Ints, Ints]:
        """Return `StepInputs.sampled` and `sampled_rows` of a step that samples after each slot's last known token."""
        known = self.num_known[slots]
        is_sampled = ends == known
        if len(slots) == num_tokens and is_sampled.all():
            every = self._indexes[: len(slots)]
            return every, every
        assert (ends <= known).all(), f"slots {slots[ends > known]} are planned beyond their known tokens"
        sampled = np.flatnonzero(is_sampled)
        return sampled, (np.cumsum(counts) - 1)[sampled]

    def _add(self, request: NewRequest) -> None:
        slot = request.slot
        token_ids = np.frombuffer(request.token_ids, np.int32)
        block_ids = ids_by_group(request.block_ids, len(self.group_tables))
        self.token_ids[slot, : len(token_ids)] = token_ids
        self.group_tables[:, slot, : block_ids.shape[1]] = block_ids
        self.num_known[slot] = len(token_ids)
        self.num_computed[slot] = request.num_computed_tokens
        self.num_prompt[slot] = request.num_prompt_tokens
        self.generation[slot] += 1
        self.adapter[slot] = request.adapter
        self._num_blocks[slot] = block_ids.shape[1]

    def _append_blocks(self, slots: NDArray[np.int32], block_ids: bytes) -> Ints:
        num_groups, _, num_columns = self.group_tables.shape
        indices = np.empty(len(slots), np.int64)
        for row, slot in enumerate(slots.tolist()):
            indices[row] = slot * num_columns + self._num_blocks[slot]
            self._num_blocks[slot] += 1
        for table, ids in zip(self.group_tables, ids_by_group(block_ids, num_groups), strict=True):
            table.ravel()[indices] = ids
        return indices


def ids_by_group(block_ids: bytes, num_groups: int) -> NDArray[np.int32]:
    """Return int32[G, n]: the block ids of a message, which are int32[n, G]."""
    ids = np.frombuffer(block_ids, np.int32)
    return np.array([ids[group::num_groups] for group in range(num_groups)])


def _told_rows(counts: Ints, num_sampled: Ints) -> tuple[Ints, Ints]:
    """Return `StepInputs.sampled` and `sampled_rows` of a step that samples after each slot's last `num_sampled`
    tokens."""
    sampled = np.repeat(np.arange(len(counts)), num_sampled)
    return sampled, np.repeat(np.cumsum(counts) - num_sampled, num_sampled) + counted(num_sampled)


def _drafts(sampled: Ints, sampled_rows: Ints, token_ids: NDArray[np.int32]) -> Ints | None:
    """Return `StepInputs.draft_ids` of a step whose tokens are `token_ids`."""
    has_draft = sampled[:-1] == sampled[1:]
    if not has_draft.any():
        return None
    draft_ids = np.full(len(sampled), -1, np.int64)
    with_draft = np.flatnonzero(has_draft)
    draft_ids[with_draft] = token_ids[sampled_rows[with_draft] + 1]
    return draft_ids


def counted(counts: Ints) -> Ints:
    """Return 0 to `counts[i]` - 1 for each i, one after the other. For example, [2, 3] gives [0, 1, 0, 1, 2]."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
