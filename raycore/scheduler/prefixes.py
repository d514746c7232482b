"""Prefix caching for requests: finds cached blocks for waiting requests, and adds the blocks of running requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from raycore.kvcache.block_table import BlockTable
from raycore.kvcache.prefix_cache import NOTHING_CACHED, CachedPrefix, CacheWatcher, PrefixCache, extend_digests
from raycore.scheduler.prefix_states import PrefixStates
from raycore.scheduler.request import Request
from raycore.scheduler.slots import SlotTable


class PrefixWatcher(CacheWatcher, Protocol):
    """Is told what the prefix cache gets and loses."""

    def stored(
        self, request: Request, indexes: Sequence[int], blocks: NDArray[np.int32], group: int, *, is_planned: bool
    ) -> None:
        """Note that blocks of a request were added to a group.

        Args:
            indexes: which of its blocks, ascending.
            blocks: the ids of all its blocks in the group.
            is_planned: whether their content is only complete after the step that is being planned.
        """
        ...


class Prefixes:
    """Connects the prefix cache to requests: `slots` has the running requests, and `blocks` has each slot's blocks."""

    def __init__(
        self, cache: PrefixCache, slots: SlotTable, blocks: BlockTable, states: PrefixStates | None = None
    ) -> None:
        """`states`: those of prefixes, of a model whose layers keep states."""
        self._states = states
        self._cache = cache
        self._slots = slots
        self._blocks = blocks
        self._block_size = blocks.block_size
        self._watcher: PrefixWatcher | None = None

    def watch(self, watcher: PrefixWatcher) -> None:
        """Tell `watcher` what the prefix cache gets and loses from now on."""
        self._watcher = self._cache.watcher = watcher

    def find(self, request: Request) -> CachedPrefix:
        """Return the cached blocks that a waiting request can reuse. They never include the request's last token."""
        if not request.reads_prefix_cache:
            return NOTHING_CACHED
        num_blocks = (len(request.tokens) - 1) // self._block_size
        request.extend_digests(request.tokens, num_blocks, self._block_size)
        cached = self._cache.match(request.digests, num_blocks)
        if self._states is None:
            return cached
        while (usable := self._states.num_usable(request, cached.num_blocks)) < cached.num_blocks:
            cached = self._cache.match(request.digests, usable)
        return cached

    def publish(self, slots: list[int], *, is_planned: bool = False) -> None:
        """Add to the prefix cache the slots' full blocks whose tokens have arrived and are planned for computation.

        Requests in the same plan can already reuse these blocks: in each layer, a step writes all its keys and values
        before it reads any.

        `is_planned`: whether the step that is being planned computes the last of them.
        """
        table, insert = self._slots, self._cache.insert
        groups, frees_blocks = range(self._blocks.num_groups), self._blocks.frees_blocks
        num_known = np.minimum(table.computed[slots], table.received[slots])
        for slot, num_full in zip(slots, (num_known // self._block_size).tolist(), strict=True):
            request = table.requests[slot]
            assert request is not None
            limit = request.max_published_blocks
            end = num_full if num_full < limit else limit
            if end <= request.num_published_blocks:
                continue
            # not by the request's method, because in some steps all requests get here
            extend_digests(
                request.digests, table.tokens[slot], end, self._block_size, request.root_digest, request.features
            )
            digests, first = request.digests, request.num_published_blocks
            for group in groups:
                block_ids = self._blocks.row(slot, group)
                if frees_blocks:
                    # with steps in flight, a short window may have given blocks back before their tokens arrived
                    first = max(request.num_published_blocks, self._blocks.first_held(slot, group))
                if self._watcher is None:
                    for index in range(first, end):
                        insert(digests[index], int(block_ids[index]), group)
                    continue
                added = [index for index in range(first, end) if insert(digests[index], int(block_ids[index]), group)]
                if added:
                    self._watcher.stored(request, added, block_ids, group, is_planned=is_planned)
            request.num_published_blocks = end
