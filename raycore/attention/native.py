"""Attention by native kernels for CPUs, which read keys and values where they lie in the cache.

A token's result has the same bits whatever else the step computes, so this backend is always batch-invariant.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raycore.attention.kv_tensors import KVTensors
from raycore.attention.spec import AttentionSpec
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

_MAX_HEAD_DIM = 256
_MAX_BLOCK_SIZE = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def supports(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute attention with these sizes."""
    is_even = head_dim % 2 == block_size % 2 == 0
    return is_even and head_dim <= _MAX_HEAD_DIM and block_size <= _MAX_BLOCK_SIZE and dtype in _DTYPES


class NativeAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, spec: AttentionSpec, kv: KVTensors) -> None:
        self._heads = spec.heads
        self._kv = kv
        self._windows = [window or 0 for window in spec.windows]
        no_norm, no_sinks = torch.empty(0, 0, dtype=spec.dtype), torch.empty(0)
        self._norms = [no_norm if weight_NH is None else weight_NH.contiguous() for weight_NH in spec.qk_norms_NH]
        self._eps = spec.norm_eps
        self._norm_offset = spec.norm_offset
        self._cosines_and_sines_PH = [rope.cosines_and_sines() for rope in spec.ropes]
        self._scale = spec.scale
        self._softcap = spec.softcap or 0.0
        self._sinks = [no_sinks if sinks_N is None else sinks_N.float() for sinks_N in spec.sinks_N]
        self._tables = self._sequences = torch.empty(0)
        self._attend = torch.ops.raycore.attention.default

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        first_rows = step.last_rows + 1 - step.counts
        sequences = np.stack([step.slots, first_rows, step.counts, step.starts], axis=1)
        self._sequences = torch.as_tensor(sequences.astype(np.int32))
        self._tables = tensors.block_tables_SM

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        return self._attend(
            qkv_TO,
            self._norms[layer],
            self._eps,
            self._norm_offset,
            self._cosines_and_sines_PH[layer],
            self._kv.blocks[layer],
            self._tables,
            self._sequences,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._kv.block_size,
            self._windows[layer],
            self._scale,
            self._softcap,
            self._sinks[layer],
        )
