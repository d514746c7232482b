"""The cache that attention with certain heads needs."""

from __future__ import annotations

import torch

from raycore.attention.kv_tensors import KVTensors
from raycore.attention.latent_tensors import LatentTensors
from raycore.models.mixers.spec import HeadShape

PagedCache = KVTensors | LatentTensors


def make_cache(
    heads: HeadShape, num_layers: int, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> PagedCache:
    """Allocate the cache of `num_layers` layers. `dtype`: of the stored numbers."""
    if heads.latent_rank is not None:
        return LatentTensors(num_layers, num_blocks, heads.head_dim, block_size, dtype, device)
    return KVTensors(num_layers, num_blocks, heads.num_kv_heads, block_size, heads.head_dim, dtype, device)


def bytes_per_block(heads: HeadShape, num_layers: int, block_size: int, dtype: torch.dtype) -> int:
    """Return how many bytes one block takes over `num_layers` layers."""
    if heads.latent_rank is not None:
        return LatentTensors.bytes_per_block(num_layers, heads.head_dim, block_size, dtype)
    return KVTensors.bytes_per_block(num_layers, heads.num_kv_heads, block_size, heads.head_dim, dtype)
