"""Tells KV events and the KV connector what the prefix cache gets and loses."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from raycore.kv_transfer.events import MEDIUM_GPU, AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from raycore.messages import NO_ADAPTER
from raycore.scheduler.request import Request
from raycore.scheduler.slots import SlotTable
from raycore.scheduler.transfers import Transfers


class CacheWatch:
    """Implements `PrefixWatcher`. `events` gets the KV events, if it isn't None."""

    def __init__(
        self,
        slots: SlotTable,
        block_size: int,
        num_groups: int,
        events: list[KVCacheEvent] | None,
        transfers: Transfers | None,
    ) -> None:
        self._slots = slots
        self._block_size = block_size
        self._num_groups = num_groups
        self._events = events
        self._transfers = transfers

    def stored(
        self, request: Request, indexes: Sequence[int], blocks: NDArray[np.int32], group: int, *, is_planned: bool
    ) -> None:
        """See `PrefixWatcher`."""
        # of each run of neighbors, the difference to their rank is the same
        for _, ranked in groupby(enumerate(indexes), lambda pair: pair[1] - pair[0]):
            run = [index for _, index in ranked]
            first, end = run[0], run[-1] + 1
            if self._transfers is not None:
                digests, ids = request.digests[first:end], blocks[first:end].tolist()
                self._transfers.note_stored(request, digests, ids, first, is_planned=is_planned)
            if self._events is not None:
                self._events.append(self._stored_event(request, first, end, group))

    def removed(self, digest: bytes, group: int) -> None:
        """See `CacheWatcher`."""
        if self._transfers is not None:
            self._transfers.connector.block_removed(digest)
        if self._events is not None:
            self._events.append(BlockRemoved([digest], MEDIUM_GPU, group_idx=self._group(group)))

    def cleared(self) -> None:
        """See `CacheWatcher`."""
        if self._transfers is not None:
            self._transfers.connector.cache_cleared()
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def _stored_event(self, request: Request, first: int, end: int, group: int) -> BlockStored:
        size = self._block_size
        is_adapted = request.adapter != NO_ADAPTER
        return BlockStored(
            block_hashes=request.digests[first:end],
            parent_block_hash=request.digests[first - 1] if first else None,
            token_ids=self._slots.tokens[request.slot, first * size : end * size].tolist(),
            block_size=size,
            lora_id=request.adapter if is_adapted else None,
            medium=MEDIUM_GPU,
            lora_name=request.lora_name,
            group_idx=self._group(group),
        )

    def _group(self, group: int) -> int | None:
        return group if self._num_groups > 1 else None
