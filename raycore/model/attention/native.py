"""Attention by native kernels for CPUs, which read keys and values where they lie in the cache.

A token's result has the same bits whatever else the step computes, so this backend is batch-invariant, too. In
bfloat16, if the processor can multiply such numbers, the kernels compute everything. Otherwise prompts without a cached
prefix are left to torch's SDPA, which is faster for them and not batch-invariant.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.kernels import library as kernels
from raycore.model.attention.gather import WholePrompts
from raycore.model.attention.kv_tensors import KVTensors
from raycore.model.attention.spec import AttentionSpec
from raycore.model.batch import StepInputs

_MAX_HEAD_DIM = 256
_MAX_BLOCK_SIZE = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_BFLOAT16_SETS = ("avx512_bf16", "amx")
"""The kernels' instruction sets that multiply bfloat16 numbers."""
_SDPA_FROM = 64
"""Prompts of at least this many tokens are computed by SDPA, whose matrix products pay for long ones."""


def supports(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute attention with these sizes."""
    is_even = head_dim % 2 == block_size % 2 == 0
    return is_even and head_dim <= _MAX_HEAD_DIM and block_size <= _MAX_BLOCK_SIZE and dtype in _DTYPES


class NativeAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, spec: AttentionSpec, kv: KVTensors, *, batch_invariant: bool = False) -> None:
        self._heads = spec.heads
        self._kv = kv
        self._windows = [window or 0 for window in spec.windows]
        no_norm = torch.empty(0, 0, dtype=spec.dtype)
        self._norms = [no_norm if weight_NH is None else weight_NH.contiguous() for weight_NH in spec.qk_norms_NH]
        self._eps = spec.norm_eps
        self._cosines_and_sines_PH = spec.rope.cosines_and_sines()
        self._scale = 1.0 / math.sqrt(spec.heads.head_dim)
        self._longest_for_sdpa = 0
        if not batch_invariant and not _has_tiles(spec, kv.block_size):
            self._longest_for_sdpa = min((w for w in self._windows if w), default=sys.maxsize)
        self._tables = self._sequences = torch.empty(0)
        self._prompts: list[WholePrompts] = []
        self._attend = torch.ops.raycore.attention.default

    def begin(self, step: StepInputs, block_tables: NDArray[np.int32]) -> None:
        is_for_sdpa = (step.starts == 0) & (step.counts >= _SDPA_FROM) & (step.counts <= self._longest_for_sdpa)
        first_rows = step.last_rows + 1 - step.counts
        sequences = np.stack([step.slots, first_rows, step.counts, step.starts, ~is_for_sdpa], axis=1)
        self._sequences = torch.as_tensor(sequences.astype(np.int32))
        self._tables = torch.as_tensor(block_tables)
        self._prompts = []
        for index in np.flatnonzero(is_for_sdpa):
            row, count = int(first_rows[index]), int(step.counts[index])
            last = self._prompts[-1] if self._prompts else None
            if last is not None and last.count == count and last.end == row:
                last.num_prompts += 1
            else:
                self._prompts.append(WholePrompts(self._heads, row, count))

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        out_TO = self._attend(
            qkv_TO,
            self._norms[layer],
            self._eps,
            self._cosines_and_sines_PH,
            self._kv.blocks[layer],
            self._tables,
            self._sequences,
            self._heads.num_heads,
            self._heads.num_kv_heads,
            self._kv.block_size,
            self._windows[layer],
            self._scale,
        )
        for prompts in self._prompts:
            out_TO[prompts.row : prompts.end] = prompts.attend(self._kv.blocks[layer], qkv_TO)
        return out_TO


def _has_tiles(spec: AttentionSpec, block_size: int) -> bool:
    """Whether the kernels compute many tokens with products of bfloat16 tiles."""
    is_bfloat16 = spec.dtype == torch.bfloat16 and kernels.load() in _BFLOAT16_SETS
    return is_bfloat16 and spec.heads.head_dim % 32 == 0 and block_size % 16 == 0
