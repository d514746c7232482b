"""Chooses the size of a rank's KV cache."""

from __future__ import annotations

from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.executor.base import Executor


def choose_num_blocks(config: EngineConfig, executor: Executor) -> int:
    """The number of blocks that every worker of a rank has memory for, or the one that the configuration gives.

    Raises:
        InvalidConfig: they can't hold one request of `max_model_len` tokens.
    """
    cache, block_size = config.cache, config.cache.block_size
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override
    by_worker = zip(executor.determine_available_memory(), executor.bytes_per_block(), strict=True)
    available, bytes_per_block = min(by_worker, key=lambda sizes: sizes[0] / sizes[1])
    num_blocks = available // bytes_per_block
    longest = config.scheduler.max_model_len
    if num_blocks * block_size < longest:
        raise InvalidConfig(
            f"the KV cache would hold {num_blocks * block_size} tokens ({available / 2**20:.1f} MiB at "
            f"{bytes_per_block / block_size:.0f} bytes a token), less than max_model_len={longest}: lower "
            "max_model_len, or raise kv_cache_memory_bytes or gpu_memory_utilization"
        )
    # max_num_seqs requests of max_model_len tokens need no more blocks than this, and each block costs bookkeeping
    most_useful = config.scheduler.max_num_seqs * -(-longest // block_size)
    return int(min(num_blocks, most_useful))
