"""Keeps the block ids of each slot, in the order of the slot's tokens, for each group of layers.

A slot has equally many blocks of each group. In a group with a sliding window, the first blocks are given back once no
later token sees them. Their numbers stay in the row, and mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from raycore.cache_layout import first_seen_block
from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.prefix_cache import NOTHING_CACHED, CachedPrefix

NO_BLOCK = -1
"""Instead of a block's id: the slot has given the block back, or never had one there."""


class BlockTable:
    """Rows of block ids for each slot, allocated from `pool`.

    `capacity`, int64[num_slots], is the number of tokens that fit into each slot's blocks. Callers must not change it.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        block_size: int,
        pool: BlockPool,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        """`windows`: by group, how many tokens a token sees, itself included. None: all tokens up to its own."""
        self.block_size = block_size
        self.pool = pool
        self.windows = list(windows)
        self.num_groups = len(self.windows)
        self._groups_of = {
            window: [group for group, own in enumerate(windows) if own == window]
            for window in dict.fromkeys(windows)
            if window is not None
        }
        """By window: its groups."""
        self.capacity = np.zeros(num_slots, np.int64)
        self._ids = np.zeros((num_slots, -(-max_tokens // block_size) * self.num_groups), np.int32)
        """By slot: the first block of each group, then the second one of each, and so on."""
        self._first = np.zeros((self.num_groups, num_slots), np.int64)
        """By group and slot: the index of the first block that the slot holds."""

    @property
    def frees_blocks(self) -> bool:
        """Whether there is a group with a window."""
        return bool(self._groups_of)

    def row(self, slot: int, group: int = 0) -> NDArray[np.int32]:
        """The slot's block ids in a group, as a view."""
        end = int(self.capacity[slot]) // self.block_size * self.num_groups
        return self._ids[slot, group : end : self.num_groups]

    def rows(self, slot: int) -> NDArray[np.int32]:
        """The slot's block ids in all groups, int32[n · num_groups], as a view: for each place, one of each group."""
        return self._ids[slot, : self._num_blocks(slot) * self.num_groups]

    def places(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where tokens are in the first group: block · block size + index in the block. `positions`: in their slots."""
        blocks, index = np.divmod(positions, self.block_size)
        return self._ids[slots, blocks * self.num_groups].astype(np.int64) * self.block_size + index

    def first_held(self, slot: int, group: int) -> int:
        """The index in the row of the first block that the slot holds."""
        return int(self._first[group, slot])

    def num_held(self, slot: int) -> list[int]:
        """By group: number of blocks that the slot holds."""
        return [self._num_blocks(slot) - first for first in self._first[:, slot].tolist()]

    def num_missing(self, slot: int, num_tokens: int) -> int:
        """How many more blocks, of all groups, the slot needs to hold `num_tokens`."""
        return self.num_groups * max(0, -((int(self.capacity[slot]) - num_tokens) // self.block_size))

    def ids_by_group(self, slot: int) -> list[list[int]]:
        """By group: the slot's block ids, from its first token on. `NO_BLOCK` where it holds none."""
        firsts = self._first[:, slot].tolist()
        return [[NO_BLOCK] * first + self.row(slot, group)[first:].tolist() for group, first in enumerate(firsts)]

    def held(self, slot: int) -> NDArray[np.int32]:
        """The ids of all blocks that the slot holds, in the order of its tokens."""
        rows = self.rows(slot)
        if not self.frees_blocks:
            return rows
        is_held = np.ones(len(rows), np.bool_)
        for group, first in enumerate(self._first[:, slot].tolist()):
            is_held[group : first * self.num_groups : self.num_groups] = False
        return rows[is_held]

    def begin(self, slot: int, cached: CachedPrefix = NOTHING_CACHED, num_loaded: int = 0) -> None:
        """Start the slot's rows, which must be empty, with what the prefix cache found.

        `num_loaded`: how many tokens after these are loaded. Each group gets those of their blocks that later tokens
        see, and `cached` has no others of a group with a window.
        """
        assert self.capacity[slot] == 0, slot
        self._first[:, slot] = 0
        for group, blocks in enumerate(cached.blocks):
            row = self._ids[slot, group : cached.num_blocks * self.num_groups : self.num_groups]
            first = self._first[group, slot] = cached.num_blocks - len(blocks)
            row[:first] = 0
            row[first:] = blocks
            self.pool.share(blocks)
        self.capacity[slot] = cached.num_blocks * self.block_size
        if num_loaded:
            self._begin_loaded(slot, cached.num_blocks, cached.num_blocks * self.block_size + num_loaded)

    def _begin_loaded(self, slot: int, num_cached: int, num_tokens: int) -> None:
        """Add the blocks for tokens that are loaded, up to the first `num_tokens` ones."""
        num_blocks = -(-num_tokens // self.block_size)
        self.capacity[slot] = num_blocks * self.block_size
        for group in range(self.num_groups):
            first = max(num_cached, self.first_seen(group, num_tokens))
            row = self.row(slot, group)
            row[num_cached:first] = 0
            row[first:] = self.pool.take(num_blocks - first)
            if first > num_cached:
                self._first[group, slot] = first  # no cached block is seen

    def first_seen(self, group: int, num_tokens: int) -> int:
        """Return the first block with a token that the token after `num_tokens` ones, or a later one, sees."""
        window = self.windows[group]
        return 0 if window is None else first_seen_block(window, num_tokens, self.block_size)

    def grow(self, slot: int, num_tokens: int) -> list[int]:
        """Add blocks to the slot's rows until they can hold `num_tokens`.

        Returns the ids of the added blocks: for each place in the rows, one of each group.
        """
        missing = self.num_missing(slot, num_tokens)
        if not missing:
            return []
        added = self.pool.take(missing)
        start = self._num_blocks(slot) * self.num_groups
        self._ids[slot, start : start + missing] = added
        self.capacity[slot] += missing // self.num_groups * self.block_size
        return added

    def grow_each(self, slots: NDArray[np.int64]) -> NDArray[np.int32]:
        """Add one block to each row of each of `slots`, without repetition.

        Returns the ids of the added blocks, int32[n · num_groups]: for each slot, one of each group.
        """
        added = np.array(self.pool.take(len(slots) * self.num_groups), np.int32)
        places = self.capacity[slots] // self.block_size
        if self.num_groups == 1:
            self._ids[slots, places] = added  # as below, in less time
        else:
            for group in range(self.num_groups):
                self._ids[slots, places * self.num_groups + group] = added[group :: self.num_groups]
        self.capacity[slots] += self.block_size
        return added

    def release_unseen(self, slots: NDArray[np.int64], num_computed: NDArray[np.int64]) -> None:
        """Give back the blocks of `slots` that no token sees that comes after the first `num_computed[i]` ones."""
        for window, groups in self._groups_of.items():
            first = np.maximum(num_computed - window + 1, 0) // self.block_size
            has_unseen = (first > self._first[groups[0], slots]).nonzero()[0]
            for slot, end in zip(slots[has_unseen].tolist(), first[has_unseen].tolist(), strict=True):
                for group in groups:
                    self.pool.release(self.row(slot, group)[self._first[group, slot] : end])
                    self._first[group, slot] = end

    def end(self, slot: int) -> None:
        """Release the slot's blocks, and empty its rows."""
        self.pool.release(self.held(slot))
        self.capacity[slot] = 0

    def check_integrity(self, others: Iterable[int] = ()) -> None:
        """Assert that the pool's reference counts agree with the rows, and with `others`' references to blocks."""
        used = np.flatnonzero(self.capacity).tolist()
        held = [
            self.row(slot, group)[self.first_held(slot, group) :] for slot in used for group in range(self.num_groups)
        ]
        ids = np.concatenate([*held, np.array([*others], np.int32)])
        self.pool.check_integrity(np.bincount(ids, minlength=self.pool.num_blocks))

    def check_seen(self, num_computed: NDArray[np.int64]) -> None:
        """Assert that each slot holds all blocks that tokens see after its first `num_computed[slot]` ones."""
        for group in range(self.num_groups):
            for slot in np.flatnonzero(self.capacity).tolist():
                assert self.first_held(slot, group) <= self.first_seen(group, int(num_computed[slot])), (slot, group)

    def _num_blocks(self, slot: int) -> int:
        """Number of the slot's blocks in each group, with those that it has given back."""
        return int(self.capacity[slot]) // self.block_size
