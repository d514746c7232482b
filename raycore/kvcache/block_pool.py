"""Allocates KV cache blocks: counts references, and decides which cached blocks are evicted first.

A block without references is free. Free blocks without cached content are allocated first. When none is left, free
blocks with cached content are evicted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from raycore.kvcache.prefix_cache import PrefixCache


class BlockPool:
    """Allocates the blocks of a KV cache, numbered from 0 to `num_blocks - 1`, and counts the references to each."""

    def __init__(self, num_blocks: int, prefix_cache: PrefixCache) -> None:
        """`prefix_cache`: stays empty if nobody inserts blocks."""
        assert num_blocks > 0, num_blocks
        self.num_blocks = num_blocks
        self.prefix_cache = prefix_cache
        self._num_references = np.zeros(num_blocks, np.int32)
        self._blank = list(range(num_blocks - 1, -1, -1))
        """Free blocks without cached content, as a stack."""
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Free blocks with cached content, least recently used first."""

    @property
    def num_free(self) -> int:
        """Number of blocks that `take` can return, including those with cached content."""
        return len(self._blank) + len(self._cached)

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use, 0 to 1."""
        return 1.0 - self.num_free / self.num_blocks

    def take(self, count: int) -> list[int]:
        """Allocate `count` free blocks, with one reference each. Cached content of these blocks is evicted.

        The caller must make sure that `num_free` is at least `count`.
        """
        assert 0 <= count <= self.num_free, (count, self.num_free)
        split = max(0, len(self._blank) - count)
        blocks = self._blank[split:][::-1]
        del self._blank[split:]
        while len(blocks) < count:
            blocks.append(self._evict())
        self._num_references[blocks] = 1
        return blocks

    def num_free_among(self, blocks: list[int]) -> int:
        """How many of `blocks` are free. `share(blocks)` reduces `num_free` by that number."""
        return sum(1 for block in blocks if block in self._cached)

    def share(self, blocks: list[int]) -> None:
        """Add a reference to each of `blocks`, which the prefix cache found."""
        for block in blocks:
            self._cached.pop(block, None)
        self._num_references[blocks] += 1

    def release(self, blocks: NDArray[np.int32]) -> None:
        """Drop one request's reference to each of its blocks. `blocks` is in the order of the request's tokens.

        Of these blocks, the last one is evicted first, because a cached block is of use only while all blocks before it
        are cached.
        """
        self._num_references[blocks] -= 1
        for block in blocks[self._num_references[blocks] == 0][::-1].tolist():
            if block in self.prefix_cache:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def forget(self) -> None:
        """Clear the prefix cache. Blocks in use stay allocated, but later requests don't find them in the cache."""
        self.prefix_cache.clear()
        self._blank.extend(self._cached)
        self._cached.clear()

    def check_integrity(self, references: NDArray[np.int64]) -> None:
        """Assert that reference counts, free blocks and prefix cache agree.

        Args:
            references: int64[num_blocks], the number of references that callers have to each block.
        """
        assert (self._num_references == references).all()
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free)
        assert sorted(free) == np.flatnonzero(references == 0).tolist()
        self.prefix_cache.check_integrity()
        assert all(block in self.prefix_cache for block in self._cached)
        assert not any(block in self.prefix_cache for block in self._blank)

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        self.prefix_cache.remove(block)
        return block
