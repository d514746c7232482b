"""The cache that attention with certain heads needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from raycore.attention.kv_tensors import KVTensors, zeros
from raycore.attention.latent_tensors import LatentTensors
from raycore.cache_layout import CachePage
from raycore.models.mixers.spec import HeadShape

PagedCache = KVTensors | LatentTensors


class CachePages:
    """The memory of the pages of all blocks of a worker, whose layers may have different heads."""

    def __init__(
        self,
        pages: Mapping[int, CachePage],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        beside: Mapping[int, CachePage] | None = None,
    ) -> None:
        """
        Args:
            pages: by layer: see `CacheLayout.pages`.
            dtype: of the stored numbers.
            beside: by layer: see `CacheLayout.pages_beside`. None: there are none.
        """
        self._pages, self._num_blocks, self._block_size = pages, num_blocks, block_size
        self._dtype, self._device = dtype, device
        self._beside = beside or {}
        self._order = [*dict.fromkeys(pages[layer] for layer in sorted(pages)), *self._beside.values()]
        counts = Counter(page.num_bytes for page in self._order)
        self._memory = {
            num_bytes: zeros((num, num_blocks * num_bytes // dtype.itemsize), dtype, device).unbind()
            for num_bytes, num in counts.items()
        }

    @property
    def blocks(self) -> list[Tensor]:
        """The memory of each page, in the order of the layers that have them. Those beside come last."""
        return [self._memory_of(page) for page in self._order]

    def of_layers(self, heads: HeadShape, layers: Sequence[int]) -> PagedCache:
        """Return the cache of these layers, in this order, all of which have such heads.

        Where a page has several blocks of them, they use the first: see `blocks_in_page`.
        """
        memory = [self._memory_of(self._pages[layer]) for layer in layers]
        beside = [self._memory_of(self._beside[layer]) if layer in self._beside else None for layer in layers]
        sizes = len(layers), self._num_blocks, self._block_size
        return make_cache(heads, *sizes, self._dtype, self._device, memory, beside)

    def _memory_of(self, page: CachePage) -> Tensor:
        return self._memory[page.num_bytes][page.place]

    def blocks_in_page(self, heads: HeadShape, layer: int) -> int:
        """Return how many blocks of a layer with such heads its page has memory for."""
        return self._pages[layer].num_bytes // bytes_per_block(heads, 1, self._block_size, self._dtype)


def make_cache(
    heads: HeadShape,
    num_layers: int,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    memory: Sequence[Tensor] | None = None,
    beside: Sequence[Tensor | None] = (),
) -> PagedCache:
    """Return the cache of `num_layers` layers.

    Args:
        dtype: of the stored numbers.
        memory: as in `KVTensors`.
        beside: as `memory`.
    """
    if heads.latent_rank is not None:
        return LatentTensors(num_layers, num_blocks, heads.head_dim, block_size, dtype, device, memory, beside)
    sizes = num_layers, num_blocks, heads.num_kv_heads, block_size, heads.head_dim
    return KVTensors(*sizes, dtype, device, memory, beside)


def bytes_per_block(heads: HeadShape, num_layers: int, block_size: int, dtype: torch.dtype) -> int:
    """Return how many bytes one block takes over `num_layers` layers."""
    if heads.latent_rank is not None:
        return LatentTensors.bytes_per_block(num_layers, heads.head_dim, block_size, dtype)
    return KVTensors.bytes_per_block(num_layers, heads.num_kv_heads, block_size, heads.head_dim, dtype)
