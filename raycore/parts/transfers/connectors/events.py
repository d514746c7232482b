"""KV events: what happens to the blocks of a prefix cache, in the form in which vLLM publishes it.

Readers of vLLM's events decode these, too: a batch is an array, and an event a map with its type's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

MEDIUM_GPU = "GPU"
"""The KV cache of the workers' device, whatever that is."""
MEDIUM_CPU = "CPU"
"""The host's memory."""


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """What has happened to blocks."""


class BlockStored(KVCacheEvent, omit_defaults=True, gc=False, tag=True):
    """Blocks of one sequence, each the next one's parent, have been added."""

    block_hashes: list[bytes]
    """Their digests: see `raycore.kvcache.prefix_cache`."""
    parent_block_hash: bytes | None
    """The digest of the block before. None: the first one is the sequence's first."""
    token_ids: list[int]
    """Of all these blocks. Empty for blocks that are in other places than the KV cache."""
    block_size: int
    """Number of tokens in a block."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    """Of models with several groups of layers: which of them."""


class BlockRemoved(KVCacheEvent, omit_defaults=True, gc=False, tag=True):
    """Blocks have been removed from a medium."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVCacheEvent, omit_defaults=True, gc=False, tag=True):
    """All blocks have been removed from the KV cache."""


AnyEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """The events of a step of one rank."""

    ts: float
    """Seconds since the epoch."""
    events: list[AnyEvent]
    data_parallel_rank: int | None = None


EventSink = Callable[[list[KVCacheEvent]], None]
"""Gets the events of a step, in order, on the engine's thread. It must not block."""
