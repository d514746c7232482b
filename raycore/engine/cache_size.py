"""Chooses a rank's KV cache: the groups of layers that share blocks, and the number of blocks."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence

from raycore.cache_layout import CacheLayout, KVCacheConfig, WorkerCacheSpec, divide_layers, model_layers
from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.executor.base import Executor

logger = logging.getLogger(__name__)


def choose_cache(config: EngineConfig, executor: Executor, num_blocks: int | None = None) -> KVCacheConfig:
    """Return the cache that all workers of a rank have.

    Args:
        num_blocks: the number of blocks of ranks that this one will join. None: there are none, so as many as the
            configuration says, or as every worker has memory for.

    Returns: the cache. Its layout says how long requests may be: less than `max_model_len` if that is to fit.

    Raises:
        InvalidConfig: they can't hold one request of `max_model_len` tokens.
    """
    specs = executor.get_kv_cache_specs()
    num_blocks = config.cache.num_gpu_blocks_override if num_blocks is None else num_blocks
    available = executor.determine_available_memory() if num_blocks is None else None
    if config.scheduler.fits_max_model_len:
        config = _fitted(config, specs, available, num_blocks)
    cache = get_kv_cache_config(config, specs, available, num_blocks)
    logger.info("%s", describe_cache(cache, specs))
    return cache


def get_kv_cache_config(
    config: EngineConfig, specs: Sequence[WorkerCacheSpec], available: Sequence[int] | None, num_blocks: int | None
) -> KVCacheConfig:
    """Return one answer for all workers: the groups of the model's layers, and the number of blocks.

    Args:
        specs: what each worker keeps in blocks.
        available: bytes that each worker's share of the cache may take. None: `num_blocks` says how many there are.

    Raises:
        InvalidConfig: the memory can't hold one request of `max_model_len` tokens.
    """
    layout = divide_layers(model_layers(specs), config.cache_limits)
    if available is None:
        assert num_blocks is not None
        return KVCacheConfig(num_blocks, layout, _num_state_parts(layout, specs))
    sizes = [(num_bytes, layout.block_bytes(spec)) for num_bytes, spec in zip(available, specs, strict=True)]
    longest, block_size = config.scheduler.max_model_len, config.tokens_per_block
    # max_num_seqs requests of max_model_len tokens need no more blocks than this, and each block costs bookkeeping
    most_useful = config.scheduler.max_num_seqs * -(-longest // block_size) * layout.num_groups
    num_held = min((num_bytes // size for num_bytes, size in sizes if size), default=most_useful)
    if num_held < layout.num_blocks_for(longest):
        raise InvalidConfig(_too_small(num_held, layout, min(sizes, key=lambda each: each[0] / (each[1] or 1))))
    return KVCacheConfig(min(num_held, most_useful), layout, _num_state_parts(layout, specs))


def _num_state_parts(layout: CacheLayout, specs: Sequence[WorkerCacheSpec]) -> int:
    """Return `KVCacheConfig.num_state_parts`. Workers without blocks have no connector."""
    sizes = [(spec.state_bytes, layout.block_bytes(spec)) for spec in specs]
    return max((-(-num_bytes // size) for num_bytes, size in sizes if size), default=0)


def _fitted(
    config: EngineConfig, specs: Sequence[WorkerCacheSpec], available: Sequence[int] | None, num_blocks: int | None
) -> EngineConfig:
    """The same configuration with the largest `max_model_len` of which the cache holds a request, at least 1."""

    def is_too_long(length: int) -> bool:
        try:
            cache = get_kv_cache_config(config.with_max_model_len(length), specs, available, num_blocks)
        except InvalidConfig:
            return True
        return cache.num_blocks < cache.layout.num_blocks_for(length)

    longest = config.scheduler.max_model_len
    fitting = max(1, bisect_left(range(1, longest + 1), True, key=is_too_long))
    if fitting < longest:
        logger.warning("max_model_len is %d instead of %d: the KV cache holds no longer request", fitting, longest)
    return config.with_max_model_len(fitting)


def _too_small(num_blocks: int, layout: CacheLayout, size: tuple[int, int]) -> str:
    """`size`: bytes of the cache and of a block on the worker with the least memory for its layers."""
    available, block_bytes = size
    limits = layout.limits
    held, needed, lower = f"{num_blocks * limits.block_size} tokens", "", ""
    if not layout.keeps_all_in_one_group:
        held, needed = f"{num_blocks} blocks", f" ({layout.num_blocks_for(limits.max_model_len)} blocks)"
        lower = "or max_num_batched_tokens, "
    return (
        f"the KV cache would hold {held} ({available / 2**20:.1f} MiB at {block_bytes / limits.block_size:.0f} bytes a "
        f"token), less than max_model_len={limits.max_model_len}{needed}: lower max_model_len, {lower}or raise "
        "kv_cache_memory_bytes or gpu_memory_utilization"
    )


def describe_cache(cache: KVCacheConfig, specs: Sequence[WorkerCacheSpec]) -> str:
    """Return what the cache holds, as text for the log, with a line for each group if there are several."""
    layout, block_size = cache.layout, cache.layout.limits.block_size
    num_tokens = layout.num_tokens_in(cache.num_blocks)
    size = max((layout.block_bytes(spec) for spec in specs), default=0)
    text = f"the KV cache holds {num_tokens} tokens ({cache.num_blocks} blocks of {block_size}, {size} bytes each)"
    if layout.keeps_all_in_one_group:
        return text
    longest = layout.limits.max_model_len
    rows = [f"{text}, in requests of max_model_len={longest} tokens, in {layout.num_groups} groups of layers:"]
    for group, most in zip(layout.groups, layout.blocks_of(longest), strict=True):
        seen = "all tokens" if group.window is None else f"a window of {group.window} tokens"
        layers = ", ".join(map(str, group.layers))
        rows.append(f"{group.kind}: {seen}, at most {most} blocks of a request, {len(group.layers)} layers ({layers})")
    return "\n    ".join(rows)
