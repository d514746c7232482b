"""The options of the KV cache."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from raycore.errors import InvalidConfig
from raycore.options.declared import option
from raycore.options.numbers import Count, whole_number

MAX_BLOCK_SIZE = 1024
CACHE_BACKENDS: dict[str, Literal["native", "triton"]] = {
    "int8_per_token_head": "native",
    "fp8": "triton",
    "fp8_e4m3": "triton",
}
"""The attention backend that each `kv_cache_dtype` but `auto` needs."""


class CacheConfig(msgspec.Struct, frozen=True):
    """The KV cache of each rank. A *block* holds the keys and values of `block_size` tokens, for all layers."""

    block_size: Annotated[int, Meta(ge=1, le=MAX_BLOCK_SIZE), option("Tokens in a block of the KV cache.")] = 16
    enable_prefix_caching: Annotated[
        bool, option("Reuse the KV cache of earlier requests for prompts with the same prefix.")
    ] = True
    gpu_memory_utilization: Annotated[
        float,
        Meta(gt=0, le=1),
        option(
            "On a GPU: fraction of its memory that a worker may use for weights, activations and KV cache, whatever "
            "other processes use. On a CPU: a worker's default KV cache is this fraction of half its equal part of "
            "the available memory, but at most 4 GiB.",
            flags=("--gpu-memory-utilization", "--device-memory-utilization"),
            metavar="FRACTION",
            is_common=True,
        ),
    ] = 0.9
    num_gpu_blocks_override: Annotated[
        Count | None,
        option(
            "Number of blocks in each rank's KV cache, on CPUs too. Takes precedence over kv_cache_memory_bytes.",
            default="as many as the cache's memory holds",
        ),
    ] = None
    kv_cache_memory_bytes: Annotated[
        Count | None,
        option(
            "KV cache size of each worker, in bytes. 4g is 4000000000, and 4G is 4 GiB.",
            default="computed from the free memory at startup",
            expected="a positive integer, also as 4g or 4G, or None",
            convert=whole_number,
        ),
    ] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "int8_per_token_head", "fp8", "fp8_e4m3"],
        option(
            "What keys and values are stored in. auto: the data type. int8_per_token_head: integers of 8 bits, and a "
            "scale for each token and head, on CPUs, with the native kernels. fp8, or fp8_e4m3: floating-point numbers "
            "of 8 bits without scales, up to 448, on GPUs with compute capability 8.9 or more, with the Triton "
            "kernels. 8 bits halve the cache's memory, and what steps read of it, for small errors in the logits. "
            "Applies to the caches of draft models, too."
        ),
    ] = "auto"
    kv_offloading_size: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        option(
            "Host memory, in GiB for all workers of a rank together, for blocks of the prefix cache that may leave the "
            "device's. The same as kv_transfer_config with OffloadConnector and cpu_bytes_to_use.",
            metavar="GIB",
        ),
    ] = None

    mamba_block_size: Annotated[
        Count | None,
        option(
            "For models whose layers keep a state instead of keys and values: after how many tokens of a sequence, "
            "again and again, its state is kept for other requests with the same prefix. A multiple of block_size.",
            default="256, or the next multiple of block_size",
        ),
    ] = None
    num_prefix_states: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        option(
            "For the same models: number of states that each rank keeps for prefixes, with enable_prefix_caching. The "
            "least recently used one gives way to a new one.",
            default="max_num_seqs",
        ),
    ] = None

    def check_memory(self, num_workers: int, total: int | None, where: str, bytes_per_block: int | None = None) -> None:
        """Check that caches aren't larger than the memory, before anything is read into it.

        Args:
            num_workers: how many workers share the memory.
            total: its size in bytes. None: unknown.
            where: what the error calls it.
            bytes_per_block: None: unknown yet.

        Raises:
            InvalidConfig: they are larger.
        """
        num_blocks, num_bytes = self.num_gpu_blocks_override, self.kv_cache_memory_bytes
        asked = f"kv_cache_memory_bytes={num_bytes}"
        if num_blocks is not None:
            num_bytes = None if bytes_per_block is None else num_blocks * bytes_per_block
            asked = f"num_gpu_blocks_override={num_blocks} ({num_bytes} bytes)"
        if num_bytes is None or total is None or num_bytes * num_workers <= total:
            return
        each = "" if num_workers == 1 else f" for each of {num_workers} workers"
        raise InvalidConfig(
            f"{asked}{each} is more memory than {where} has: {total} bytes ({total / 2**30:.1f} GiB). Lower it, or "
            "omit it: the default fits into the memory that is free"
        )
