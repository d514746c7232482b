"""Prefix caching for requests: finds cached blocks for waiting requests, and adds the blocks of running requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from raycore.kvcache.prefix_cache import extend_digests
from raycore.scheduler.part import SchedulerPart, SchedulerView, Start, Verdict


class Prefixes(SchedulerPart):
    """Connects the prefix cache to requests. Without this part, the cache stays empty."""

    order = 10

    def __init__(self) -> None:
        self._num_queried_tokens = 0
        self._num_cached_tokens = 0

    def attach(self, view: SchedulerView) -> None:
        self._cache = view.pool.prefix_cache
        self._slots = view.slots
        self._blocks = view.blocks
        self._block_size = view.blocks.block_size
        self._stored = view.hooks.blocks_stored
        self._cache.watch(view.hooks.block_removed, view.hooks.blocks_cleared)

    def offer(self, start: Start) -> Verdict:
        """Begin with the cached blocks that a request can reuse. They never include the request's last token."""
        request = start.request
        if request.reads_prefix_cache:
            num_blocks = (len(request.tokens) - 1) // self._block_size
            request.extend_digests(request.tokens, num_blocks, self._block_size)
            start.begin_with(self._cache.match(request.digests, num_blocks), self._block_size)
        return Verdict.START

    def started(self, start: Start) -> None:
        """Count what a request has found that begins for the first time."""
        if not start.request.was_started and start.request.reads_prefix_cache:
            self._num_queried_tokens += len(start.request.tokens)
            self._num_cached_tokens += start.num_published * self._block_size

    def load(self) -> dict[str, Any]:
        return {"prefix_cache_queries": self._num_queried_tokens, "prefix_cache_hits": self._num_cached_tokens}

    def blocks_filled(self, slots: list[int], *, is_planned: bool) -> None:
        """Add to the prefix cache the slots' full blocks whose tokens have arrived and are planned for computation.

        Requests in the same plan can already reuse these blocks: in each layer, a step writes all its keys and values
        before it reads any.
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
                if not self._stored:
                    for index in range(first, end):
                        insert(digests[index], int(block_ids[index]), group)
                    continue
                added = [index for index in range(first, end) if insert(digests[index], int(block_ids[index]), group)]
                if added:
                    for stored in self._stored:
                        stored(request, added, block_ids, group, is_planned=is_planned)
            request.num_published_blocks = end


def runs_of(indexes: Sequence[int]) -> Iterator[range]:
    """Yield the runs of neighbors among ascending numbers."""
    # of each run, the difference to their rank is the same
    for _, ranked in groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in ranked]
        yield range(run[0], run[-1] + 1)
