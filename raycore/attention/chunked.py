"""Attention within chunks: a token sees the tokens of its own chunk of the sequence, up to itself.

What attends to all keys computes it, as if each chunk were a sequence of its own: a step's tokens are divided at the
ends of chunks, positions are counted from the beginning of a chunk, and the blocks of a chunk are a row of their own.
Rotations only matter by how far positions are apart, so they may be counted from there, too.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device_together
from raycore.step.device_batch import StepTensors


class ChunkedAttention:
    """Divides the sequences of steps into chunks for another attention. Implements `Attention`."""

    def __init__(self, attention: Attention, chunk: int, block_size: int) -> None:
        """
        Args:
            chunk: number of tokens of a chunk, a multiple of `block_size`.
            block_size: tokens of a block of the scheduler.
        """
        assert chunk % block_size == 0, "options are checked"
        self._attention = attention
        self._chunk = chunk
        self._blocks_in_chunk = chunk // block_size
        self._pieces: tuple[bytes, bytes, int] | None = None
        """Of the last step: the slots and the chunks of its pieces, and its version of the blocks."""
        self._version = 0

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        chunk, ends = self._chunk, step.starts + step.counts
        first_chunks = step.starts // chunk
        num_pieces = (ends - 1) // chunk - first_chunks + 1
        # of each piece: which of the step's sequences it is of, and its chunk in that
        sequences = np.repeat(np.arange(len(step.slots)), num_pieces)
        chunks = np.arange(len(sequences)) - np.repeat(np.cumsum(num_pieces) - num_pieces - first_chunks, num_pieces)
        starts = np.maximum(step.starts[sequences], chunks * chunk)
        counts = np.minimum(ends[sequences], (chunks + 1) * chunk) - starts
        pieces, positions = np.arange(len(sequences)), step.positions % chunk
        own = replace(
            step,
            slots=pieces,
            counts=counts,
            starts=starts - chunks * chunk,
            token_slots=np.repeat(pieces, counts),
            positions=positions,
            block_tables=self._tables(step, sequences, chunks),
            tables_version=self._tables_version(step, sequences, chunks),
        )
        arrays = own.block_tables, own.token_slots.astype(np.int32), positions
        tables_SM, slots_T, positions_T = to_device_together(list(arrays), tensors.positions_T.device)
        self._attention.begin(
            own, replace(tensors, block_tables_SM=tables_SM, slots_T=slots_T, positions_T=positions_T)
        )

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer."""
        return self._attention(layer, qkv_TO)

    def _tables_version(self, step: StepInputs, sequences: Ints, chunks: Ints) -> int:
        """Return a number that is another one when the pieces, which have the same numbers in all steps, have others'
        blocks."""
        pieces = step.slots[sequences].tobytes(), chunks.tobytes(), step.tables_version
        if pieces != self._pieces:
            self._pieces = pieces
            self._version += 1
        return self._version

    def _tables(self, step: StepInputs, sequences: Ints, chunks: Ints) -> NDArray[np.int32]:
        """Return the blocks of each piece's chunk. Where the row of a sequence ends, its last number is repeated."""
        columns = chunks[:, None] * self._blocks_in_chunk + np.arange(self._blocks_in_chunk)
        columns = np.minimum(columns, step.block_tables.shape[1] - 1)
        return step.block_tables[step.slots[sequences][:, None], columns]
