"""Latent attention by native kernels for CPUs, which read latents where they lie in the cache.

A token's result has the same bits whatever else the step computes, so this backend is always batch-invariant.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from raycore.attention.context_share import ContextShare
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.native_step import DTYPES, NativeStep
from raycore.attention.spec import AttentionSpec

_MAX_RANK, _MAX_WIDTH = 512, 640


def supports_latents(rank: int, width: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute latent attention with these sizes: of a latent, and with its rotated key."""
    return rank % 2 == width % 2 == 0 and rank <= _MAX_RANK and width <= _MAX_WIDTH and dtype in DTYPES


class _NativeKernels(NativeStep):
    """What the kernels' arguments are made of."""

    def __init__(self, spec: AttentionSpec, kv: LatentTensors) -> None:
        super().__init__()
        self._num_heads = spec.heads.num_heads
        self._kv = kv
        self._norms_R = [
            spec.copies(partial(_norm, weight_1R)) for weight_1R in spec.qk_norms_NH if weight_1R is not None
        ]
        assert len(self._norms_R) == len(kv.blocks), "latents of every layer are normalized"
        self._eps = spec.norm_eps
        self._cosines_and_sines_PH = [rope.cosines_and_sines() for rope in spec.ropes]
        self._scale = spec.scale


class NativeLatentAttention(_NativeKernels):
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, spec: AttentionSpec, kv: LatentTensors) -> None:
        super().__init__(spec, kv)
        self._attend = torch.ops.raycore.latent_attention.default

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        return self._attend(
            qkv_TO,
            self._norms_R[layer],
            self._eps,
            self._cosines_and_sines_PH[layer],
            self._kv.blocks[layer],
            self._tables,
            self._sequences,
            self._num_heads,
            self._kv.block_size,
            self._scale,
        )


class NativePartialLatentAttention(_NativeKernels):
    """Latent attention to one worker's share of the latents. Implements `PartialAttention`.

    A head's part has as many sums of weighted numbers as a latent has numbers, the highest exponent of 2 among the
    weights, and the sum of the weights relative to it.
    """

    def __init__(self, spec: AttentionSpec, kv: LatentTensors, share: ContextShare) -> None:
        super().__init__(spec, kv)
        assert spec.heads.latent_rank is not None, "the heads are those of latent attention"
        self._rank, self._width = spec.heads.latent_rank, spec.heads.head_dim
        self._share = share
        self._like = torch.empty(0, dtype=spec.dtype)
        self._no_sinks = torch.empty(0)
        self._store = torch.ops.raycore.store_owned_latents.default
        self._attend = torch.ops.raycore.attend_to_owned_latents.default
        self._merge = torch.ops.raycore.merge_parts.default

    def store(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize latents and rotate queries and keys in place, and store the worker's share of the keys."""
        self._store(
            qkv_TO,
            self._norms_R[layer],
            self._eps,
            self._cosines_and_sines_PH[layer],
            self._kv.blocks[layer],
            self._tables,
            self._sequences,
            self._num_heads,
            self._kv.block_size,
            self._share.size,
            self._share.index,
        )

    def attend(self, layer: int, q_TX: Tensor) -> Tensor:
        """Return parts of attention, float32[T, heads · (size of a latent + 2)]."""
        return self._attend(
            q_TX,
            self._kv.blocks[layer],
            self._tables,
            self._sequences,
            q_TX.shape[1] // self._width,
            self._rank,
            self._kv.block_size,
            self._scale,
            self._share.size,
            self._share.index,
        )

    def merge(self, layer: int, parts_PTX: Tensor) -> Tensor:
        """Return attention to all keys, [T, query heads · size of a latent]."""
        parts_PTNX = parts_PTX.view(*parts_PTX.shape[:2], self._num_heads, -1)
        return self._merge(parts_PTNX, self._no_sinks, self._like)


def _norm(weight_1R: Tensor) -> Tensor:
    return weight_1R[0].contiguous()
