"""Drafts by a small model with the target's vocabulary.

The model computes a sequence's tokens only when it has to draft for it. So it may lack many tokens at first. It keeps
keys and values in blocks with the same numbers as those of the target's first group of layers, so a prefix that both
have computed is computed once.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.network import NO_TAPS, Network
from raycore.messages import StepPlan
from raycore.parts.drafts.runner.rows import DraftRows
from raycore.profile_session import ProfiledParts
from raycore.runner.compute_threads import ComputeThreads
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import DeviceBatch, StepTensors


class DraftModel:
    """Implements `DraftNetwork`."""

    def __init__(
        self,
        decoder: Network,
        attention: Attention,
        batch: DeviceBatch,
        threads: ComputeThreads,
        *,
        max_tokens: int,
        block_size: int,
        num_blocks: int,
        max_step_tokens: int,
    ) -> None:
        """
        Args:
            max_tokens: maximum length of a draft.
            num_blocks: the number of blocks before the scratch blocks.
            max_step_tokens: maximum number of tokens that are computed at once. Not less than the number of slots.
        """
        num_slots = len(batch.host.num_known)
        self.taps, self.wants_all_rows = NO_TAPS, False
        self._decoder = decoder
        self._attention = attention
        self._batch = batch
        self._threads = threads
        self._block_size = block_size
        self._max_step_tokens = max_step_tokens
        self._num_computed = np.zeros(num_slots, np.int64)
        """By slot: how many tokens have been computed in blocks of the sequence, without drafts."""
        self._drafts = np.zeros((num_slots, max_tokens), np.int32)
        """By slot: the latest draft, which followed those tokens."""
        self._num_kept = np.zeros(num_slots, np.int64)
        """By slot: how many of the draft's tokens have been computed in blocks of the sequence."""
        self._is_filled = np.zeros(num_blocks, np.bool_)
        """By block: whether it has the keys and values of all its tokens."""

    def parts(self) -> ProfiledParts:
        yield self, {"_compute": "draft_forward"}

    def apply(self, plan: StepPlan) -> None:
        num_groups = len(self._batch.host.group_tables)
        self._is_filled[np.frombuffer(plan.new_block_ids, np.int32)[::num_groups]] = False
        for request in plan.new_requests:
            block_ids = np.frombuffer(request.block_ids, np.int32)[::num_groups]
            num_cached = request.num_computed_tokens // self._block_size
            self._is_filled[block_ids[num_cached:]] = False
            is_filled = self._is_filled[block_ids[:num_cached]]
            num_filled = num_cached if is_filled.all() else int(is_filled.argmin())
            self._num_computed[request.slot] = num_filled * self._block_size
            self._num_kept[request.slot] = 0

    def sync(self, step: StepInputs, tensors: StepTensors) -> None:
        """Do nothing: the tokens are computed when they are needed."""

    def accept(self, step: StepInputs, rows: Ints) -> None:
        """Do nothing: drafts are compared with the known tokens later."""

    def begin(self, rows: DraftRows) -> Tensor:
        """Computes the tokens that the model lacks."""
        starts = self._keep_right_drafts(rows)
        missing = rows.known - starts
        while missing.sum() > self._max_step_tokens:
            counts = self._first_part(missing)
            self._compute(rows, _singles_first(np.flatnonzero(counts), counts), starts, counts, is_sampled=False)
            starts, missing = starts + counts, missing - counts
        order = _singles_first(np.arange(len(missing)), missing)
        logits_NV = self._compute(rows, order, starts, missing)
        self._fill_blocks(rows)
        self._num_computed[rows.slots] = np.minimum(rows.known, rows.capacity)
        if (order[1:] > order[:-1]).all():
            return logits_NV
        return logits_NV.index_select(0, to_device(np.argsort(order), logits_NV.device))

    def extend(self, rows: DraftRows, num_rows: int, offset: int) -> Tensor:
        first = np.arange(num_rows)
        return self._compute(rows, first, rows.known + offset, np.ones(num_rows, np.int64))

    def end(self, rows: DraftRows, drafts: list[list[int]]) -> None:
        for slot, draft in zip(rows.slots.tolist(), drafts, strict=True):
            self._drafts[slot, : len(draft)] = draft
        num_computed = np.array([len(draft) - 1 for draft in drafts])
        self._num_kept[rows.slots] = np.minimum(np.maximum(rows.capacity - rows.known, 0), num_computed)

    def _keep_right_drafts(self, rows: DraftRows) -> Ints:
        """Return how many of each row's tokens have been computed, with the drafts that were right.

        The last known token always has to be computed, because a draft begins with its logits.
        """
        slots, offsets = rows.slots, np.arange(self._drafts.shape[1])
        first = self._num_computed[slots]
        token_ids = self._batch.token_ids
        positions = np.minimum(first[:, None] + offsets, token_ids.shape[1] - 1)
        is_same = token_ids[slots[:, None], positions] == self._drafts[slots]
        is_right = np.logical_and.accumulate(is_same & (offsets < self._num_kept[slots, None]), axis=1)
        self._num_kept[slots] = 0
        return np.minimum(first + is_right.sum(axis=1), rows.known - 1)

    def _first_part(self, missing: Ints) -> Ints:
        """Return how many of each row's missing tokens are computed next, without the last one of each."""
        before_last = missing - 1
        num_before = np.cumsum(before_last) - before_last
        return np.minimum(np.maximum(self._max_step_tokens - num_before, 0), before_last)

    def _compute(self, rows: DraftRows, chosen: Ints, starts: Ints, counts: Ints, *, is_sampled: bool = True) -> Tensor:
        """Compute tokens of the `chosen` rows. Returns the logits after the last one of each, if `is_sampled`.

        `starts`, `counts`: by row. Rows with one token are chosen first.
        """
        step, tensors = rows.step(chosen, starts[chosen], counts[chosen], is_sampled=is_sampled)
        self._threads.begin_layers(self._decoder, len(step.positions), step.num_keys)
        self._attention.begin(step, tensors)
        token_ids_T = self._batch.token_ids_of(tensors)
        hidden_RD = self._decoder.forward(token_ids_T, self._attention, tensors.sampled_rows_R, self._threads.adapt)
        return self._decoder.vocabulary.logits(hidden_RD) if is_sampled else hidden_RD

    def _fill_blocks(self, rows: DraftRows) -> None:
        """Note the blocks whose tokens have all been computed."""
        firsts = self._num_computed[rows.slots] // self._block_size
        ends = np.minimum(rows.known, rows.capacity) // self._block_size
        for row in np.flatnonzero(ends > firsts).tolist():
            self._is_filled[rows.tables[row, firsts[row] : ends[row]]] = True


def _singles_first(rows: Ints, counts: Ints) -> Ints:
    """Return `rows` with those first that have one token."""
    return rows[np.argsort(counts[rows] > 1, kind="stable")]
