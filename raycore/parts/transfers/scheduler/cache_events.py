"""Tells KV events of what the prefix cache gets and loses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raycore.messages import NO_ADAPTER
from raycore.parts.transfers.connectors.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from raycore.scheduler.part import SchedulerPart, SchedulerView
from raycore.scheduler.prefixes import runs_of
from raycore.scheduler.request import Request


class CacheEvents(SchedulerPart):
    """Adds KV events to a list, in order. Others take them out."""

    order = 50

    def __init__(self, events: list[KVCacheEvent]) -> None:
        self._events = events

    def attach(self, view: SchedulerView) -> None:
        self._slots = view.slots
        self._block_size = view.blocks.block_size
        self._num_groups = view.blocks.num_groups

    def blocks_stored(
        self, request: Request, indexes: Sequence[int], blocks: NDArray[np.int32], group: int, *, is_planned: bool
    ) -> None:
        self._events += [self._stored_event(request, run.start, run.stop, group) for run in runs_of(indexes)]

    def block_removed(self, digest: bytes, group: int) -> None:
        self._events.append(BlockRemoved([digest], MEDIUM_GPU, group_idx=self._group(group)))

    def blocks_cleared(self) -> None:
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
