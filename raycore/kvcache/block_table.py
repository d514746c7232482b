"""Keeps the block ids of each slot, in the order of the slot's tokens, as one row of an array."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from raycore.kvcache.block_pool import BlockPool


class BlockTable:
    """A row of block ids for each slot, allocated from `pool`.

    `capacity`, int64[num_slots], is the number of tokens that fit into each slot's blocks. Callers must not change it.
    """

    def __init__(self, num_slots: int, max_tokens: int, block_size: int, pool: BlockPool) -> None:
        self.block_size = block_size
        self.pool = pool
        self.capacity = np.zeros(num_slots, np.int64)
        self._ids = np.zeros((num_slots, -(-max_tokens // block_size)), np.int32)

    def row(self, slot: int) -> NDArray[np.int32]:
        """The slot's block ids, as a view."""
        return self._ids[slot, : self.capacity[slot] // self.block_size]

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """How many more blocks the slot needs to hold `num_tokens`."""
        return max(0, -((int(self.capacity[slot]) - num_tokens) // self.block_size))

    def begin(self, slot: int, shared: list[int]) -> None:
        """Start the slot's row, which must be empty, with `shared`: the blocks that the prefix cache found."""
        assert self.capacity[slot] == 0, slot
        if shared:
            self.pool.share(shared)
            self._append(slot, shared)

    def grow(self, slot: int, num_tokens: int) -> list[int]:
        """Add blocks to the slot's row until it can hold `num_tokens`. Returns the ids of the added blocks."""
        missing = self.num_missing(slot, num_tokens)
        if not missing:
            return []
        added = self.pool.take(missing)
        self._append(slot, added)
        return added

    def grow_each(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Add one block to each of `slots`, without repetition. Returns the ids of the added blocks, int32[n]."""
        added = np.array(self.pool.take(len(slots)), np.int32)
        self._ids[slots, self.capacity[slots] // self.block_size] = added
        self.capacity[slots] += self.block_size
        return added

    def end(self, slot: int) -> None:
        """Release the slot's blocks, and empty its row."""
        self.pool.release(self.row(slot))
        self.capacity[slot] = 0

    def check_integrity(self) -> None:
        """Assert that the pool's reference counts agree with the rows."""
        rows = [self.row(slot) for slot in np.flatnonzero(self.capacity).tolist()]
        held = np.concatenate(rows) if rows else np.zeros(0, np.int32)
        self.pool.check_integrity(np.bincount(held, minlength=self.pool.num_blocks))

    def _append(self, slot: int, blocks: list[int]) -> None:
        first = int(self.capacity[slot]) // self.block_size
        self._ids[slot, first : first + len(blocks)] = blocks
        self.capacity[slot] += len(blocks) * self.block_size
