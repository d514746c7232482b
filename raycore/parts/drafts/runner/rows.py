"""The sequences that are drafted for together, and the steps that compute their tokens.

The tokens of drafts have positions for which a sequence may have no block yet. Their keys and values then go to scratch
blocks, of which each slot has a few. The next plan may bring other blocks for these positions, so what is in scratch
blocks doesn't last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycore.step.batch import Ints, StepInputs, counted
from raycore.step.copies import to_device, to_device_together
from raycore.step.device_batch import DeviceBatch, StepTensors


def num_scratch_blocks(num_tokens: int, block_size: int) -> int:
    """Return how many scratch blocks a slot needs for drafts of up to `num_tokens` tokens.

    The first token that is computed is the sequence's last known one, and the draft's last token isn't computed.
    """
    return -(-num_tokens // block_size)


class DraftRows:
    """Some sequences. Row i is that of slot `slots[i]`."""

    def __init__(
        self, batch: DeviceBatch, slots: Ints, num_tokens: int, block_size: int, num_blocks: int, version: int
    ) -> None:
        """
        Args:
            num_tokens: the maximum length of a draft.
            num_blocks: the number of blocks before the scratch blocks.
            version: changes with each object.
        """
        host = batch.host
        self.slots = slots
        self.known: Ints = host.num_known[slots]
        """[n]: the number of known tokens of each sequence."""
        self.capacity: Ints = host.num_blocks[slots] * block_size
        """[n]: the number of positions for which each sequence has blocks of its own."""
        self._batch = batch
        self._version = version
        num_columns = min(-(-(int(self.known.max()) + num_tokens) // block_size), host.block_tables.shape[1])
        num_scratch = num_scratch_blocks(num_tokens, block_size)
        num_own: Ints = host.num_blocks[slots]
        beyond: Ints = np.arange(num_columns)[None, :] - num_own[:, None]
        scratch: Ints = num_blocks + slots[:, None] * num_scratch + beyond
        own: NDArray[np.int32] = host.block_tables[slots, :num_columns]
        self.tables = np.where((beyond >= 0) & (beyond < num_scratch), scratch, own).astype(np.int32)
        """[n, M]: the blocks of each sequence, then its scratch blocks."""
        self._tables_NM = to_device(self.tables, batch.device)
        self._first_indices = slots * host.token_ids.shape[1]
        self._indices_N = to_device(self._first_indices + self.known, batch.device)

    def draft_indices(self, num_rows: int, offset: int) -> Tensor:
        """Return int64[num_rows]: the index in the flat table of tokens of token `offset` of the first rows' drafts."""
        return self._indices_N[:num_rows] + offset

    def step(
        self, rows: Ints, starts: Ints, counts: Ints, *, is_sampled: bool = True
    ) -> tuple[StepInputs, StepTensors]:
        """Return the inputs of a step that computes `counts[i]` tokens of row `rows[i]` from position `starts[i]` on.

        Rows with one token come first. The slots of the step are rows.

        Args:
            is_sampled: whether a token is sampled after each row's last token.
        """
        token_rows = np.repeat(rows, counts)
        positions = np.repeat(starts, counts) + counted(counts)
        sampled = np.arange(len(rows) if is_sampled else 0)
        sampled_rows = (np.cumsum(counts) - 1)[sampled]
        is_long = counts != 1
        step = StepInputs(
            slots=rows,
            counts=counts,
            starts=starts,
            num_decodes=int(is_long.argmax()) if is_long.any() else len(rows),
            token_slots=token_rows,
            positions=positions,
            sampled=sampled,
            sampled_rows=sampled_rows,
            next_positions=positions[sampled_rows] + 1,
            draft_ids=None,
            generations=np.zeros_like(sampled),
            block_tables=self.tables,
            tables_version=self._version,
        )
        return step, self._tensors(step)

    def _tensors(self, step: StepInputs) -> StepTensors:
        first_indices = self._first_indices
        arrays: list[NDArray[Any]] = [
            step.token_slots.astype(np.int32),
            step.positions,
            first_indices[step.token_slots] + step.positions,
            first_indices[step.sampled_slots] + step.next_positions,
        ]
        if not step.is_decoding:
            arrays.append(step.sampled_rows)
        slots_T, positions_T, indices_T, next_indices_R, *sampled_rows = to_device_together(arrays, self._batch.device)
        sampled_rows_R = sampled_rows[0] if sampled_rows else None
        return StepTensors(self._tables_NM, slots_T, positions_T, indices_T, next_indices_R, sampled_rows_R)
