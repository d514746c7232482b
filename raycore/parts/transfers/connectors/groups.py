"""What connectors of raycore know of groups of layers: which blocks of a prefix each group needs, and their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from raycore.cache_layout import KVCacheConfig, first_seen_block
from raycore.kvcache.prefix_cache import DIGEST_BYTES
from raycore.parts.transfers.connectors.connector import BlockIds, SchedulerConnector, TransferRequest

_STATE_WINDOW = 2
"""The last block of a prefix has the state after it: as with a window in which a token sees the one before it."""


class GroupBlocks:
    """The blocks of prefixes, by group of layers. Prefixes and places are counted in blocks."""

    def __init__(self, windows: Sequence[int | None], block_size: int) -> None:
        """`windows`: as `CacheLayout.windows`."""
        self._windows = list(windows)
        self._block_size = block_size
        self.order = sorted(range(len(windows)), key=lambda group: windows[group] is None)
        """The groups, those with a window first: of these, blocks are more often gone."""

    @classmethod
    def of(cls, cache: KVCacheConfig, block_size: int) -> GroupBlocks:
        """Return those of a cache, with the parts of states as the last groups."""
        return cls([*cache.layout.windows, *[_STATE_WINDOW] * cache.num_state_parts], block_size)

    def needed(self, group: int, first: int, end: int) -> range:
        """Return the blocks of a group that have to come for a prefix of `end` blocks, if the cache has `first`."""
        window = self._windows[group]
        seen = 0 if window is None else first_seen_block(window, end * self._block_size, self._block_size)
        return range(max(first, seen), end)

    def num_needed(self, first: int, end: int) -> int:
        """Return the number of these blocks, of all groups."""
        return sum(len(self.needed(group, first, end)) for group in self.order)

    def longest(self, first: int, end: int, has: Callable[[int, int], bool]) -> int:
        """Return the longest prefix, of at most `end` blocks, that can be completed from what is elsewhere.

        Args:
            first: the prefix that the cache has. The least that is returned.
            has: whether the block of a group and a place is elsewhere.
        """
        for group, window in enumerate(self._windows):
            if window is None:
                end = next((place for place in range(first, end) if not has(group, place)), end)
        before = -1
        while before != end:
            before = end
            for group, window in enumerate(self._windows):
                if window is not None:
                    end = self._last_boundary(group, first, end, has)
        return end

    def _last_boundary(self, group: int, first: int, end: int, has: Callable[[int, int], bool]) -> int:
        place = end
        while place > self.needed(group, first, end).start:
            place -= 1
            if not has(group, place):
                end = place  # each longer prefix needs this block, too
        return end


def block_name(digest: bytes, group: int) -> bytes:
    """Return what a block of a group is known by: the digest of its prefix in the first one, another one in others."""
    if not group:
        return digest
    return blake2b(digest, digest_size=DIGEST_BYTES, salt=group.to_bytes(2, "little"), person=b"group").digest()


class GroupedConnector(SchedulerConnector):
    """The scheduler's side of a connector that knows groups. It overrides the hooks of all groups.

    Schedulers of somebody else may call the others, for models with one group.
    """

    def update_state_after_alloc(
        self, request: TransferRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        self.update_state_after_alloc_all_groups(request, [block_ids], num_external_tokens)

    def request_finished(
        self, request: TransferRequest, block_ids: Sequence[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, [block_ids])

    def request_finished_all_groups(
        self, request: TransferRequest, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def blocks_stored(
        self, request: TransferRequest, digests: Sequence[bytes], block_ids: Sequence[int], first: int
    ) -> None:
        self.blocks_stored_of_group(request, digests, block_ids, first, 0)

    def block_removed_of_group(self, digest: bytes, group: int) -> None: ...

    def block_removed(self, digest: bytes) -> None:
        self.block_removed_of_group(digest, 0)
