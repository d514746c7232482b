"""Latent attention by native kernels for CPUs, which read latents where they lie in the cache.

A token's result has the same bits whatever else the step computes, so this backend is always batch-invariant.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.spec import AttentionSpec
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

_MAX_RANK, _MAX_WIDTH = 512, 640
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports_latents(rank: int, width: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute latent attention with these sizes: of a latent, and with its rotated key."""
    return rank % 2 == width % 2 == 0 and rank <= _MAX_RANK and width <= _MAX_WIDTH and dtype in _DTYPES


class NativeLatentAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, spec: AttentionSpec, kv: LatentTensors) -> None:
        self._num_heads = spec.heads.num_heads
        self._kv = kv
        self._norms_R = [weight_1R[0].contiguous() for weight_1R in spec.qk_norms_NH if weight_1R is not None]
        assert len(self._norms_R) == len(kv.blocks), "latents of every layer are normalized"
        self._eps = spec.norm_eps
        self._cosines_and_sines_PH = [rope.cosines_and_sines() for rope in spec.ropes]
        self._scale = spec.scale
        self._tables = self._sequences = torch.empty(0)
        self._attend = torch.ops.raycore.latent_attention.default

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        first_rows = step.last_rows + 1 - step.counts
        sequences = np.stack([step.slots, first_rows, step.counts, step.starts], axis=1)
        self._sequences = torch.as_tensor(sequences.astype(np.int32))
        self._tables = tensors.block_tables_SM

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
