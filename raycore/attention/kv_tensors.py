"""The KV cache's tensors: a pool of blocks for each layer.

This module defines the layout `[num_blocks, 2, num_kv_heads, block_size, head_dim]` and computes the indexes of its
rows. In int8, each head of a block is followed by the float32 scales of its tokens, 4 bytes each. This module doesn't
know which request a block belongs to. The memory is zeroed, because masked values are multiplied by zero: uninitialized
memory could contain NaN, and the product would be NaN.
"""

from __future__ import annotations

import copy
import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.errors import InvalidConfig


class KVTensors:
    """Keys and values of all layers. Shapes: N blocks, S block size, K key-value heads of this rank, H head dim."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Sequence[Tensor] | None = None,
        beside: Sequence[Tensor | None] = (),
    ) -> None:
        """
        Args:
            dtype: of the stored numbers.
            memory: that of each layer, in one dimension, which may have more blocks. None: it is allocated.
            beside: by layer, the memory of what it keeps of the same tokens, too.

        Raises:
            InvalidConfig: it can't be allocated, on a CPU.
        """
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        width = _head_size(block_size, head_dim, dtype)
        if memory is None:
            memory = zeros((num_layers, num_blocks * 2 * num_kv_heads * width), dtype, device).unbind()
        self.blocks = [layer.view(-1, width) for layer in memory]
        """By layer, a view [N·2·K, S·H], or in int8 [N·2·K, S·H + 4·S]: row `(block·2 + is_value)·K + head`. Attention
        gathers rows of this view."""
        self.rows = [] if dtype == torch.int8 else [layer.view(-1, head_dim) for layer in self.blocks]
        """By layer, a view [N·2·K·S, H] of the same memory: one row per block, key or value, head and token. Steps
        write rows of this view. Empty in int8, which only native kernels write."""
        self.beside = [None if layer is None else layer.view(num_blocks * block_size, -1) for layer in beside]
        """By layer, a view [N·S, X]: what it keeps of the same tokens beside. None: nothing."""
        self._heads = np.arange(2 * num_kv_heads)
        self._heads_2K11 = (np.arange(2)[:, None] * num_kv_heads + np.arange(num_kv_heads))[:, None, :, None]

    @staticmethod
    def bytes_per_block(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
        """Return how many bytes one block takes over all layers."""
        return num_layers * 2 * num_kv_heads * _head_size(block_size, head_dim, dtype) * dtype.itemsize

    def of_layers(self, layers: Sequence[int]) -> KVTensors:
        """Return the same memory with these layers, in this order."""
        part = copy.copy(self)
        part.blocks = [self.blocks[layer] for layer in layers]
        part.rows = [self.rows[layer] for layer in layers] if self.rows else []
        part.beside = [self.beside[layer] for layer in layers] if self.beside else []
        return part

    def write_rows(self, block_ids_T: NDArray[np.integer], positions_T: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return int64[T·2K]: for each token, the indexes in `rows` of its keys, head by head, then of its values."""
        first_T1 = (block_ids_T.astype(np.int64) * len(self._heads))[:, None]
        return ((first_T1 + self._heads) * self.block_size + (positions_T % self.block_size)[:, None]).ravel()

    def gather_rows(self, block_ids_BM: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return int64[2·B·K·M]: the indexes in `blocks` of the rows that give [2, B, K, M·S, H] when gathered.

        `block_ids_BM`: M blocks of each of B sequences. Keys come before values, and each head's rows are contiguous.
        """
        first_BM = block_ids_BM.astype(np.int64) * len(self._heads)
        return (self._heads_2K11 + first_BM[None, :, None, :]).ravel()


def _head_size(block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return the number of elements of one head's keys, or values, in a block."""
    return block_size * (head_dim + (torch.float32.itemsize if dtype == torch.int8 else 0))


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a zeroed tensor. On a CPU, the kernel allocates each page only when it is first touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return torch.zeros(shape, dtype=dtype)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise InvalidConfig(
            f"can't allocate {num_bytes} bytes for the KV cache ({error}): "
            "lower num_gpu_blocks_override or kv_cache_memory_bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
