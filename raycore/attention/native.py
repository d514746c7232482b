"""Attention by native kernels for CPUs, which read keys and values where they lie in the cache.

A token's result has the same bits whatever else the step computes, so this backend is always batch-invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.attention.context_share import ContextShare
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.native_step import DTYPES, NativeStep
from raycore.attention.spec import AttentionSpec
from raycore.layers.rope import Rope
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

_MAX_HEAD_DIM = 512
_MAX_BLOCK_SIZE = 256


def supports(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute attention with these sizes."""
    return supports_heads(head_dim, dtype) and block_size % 2 == 0 and block_size <= _MAX_BLOCK_SIZE


def supports_heads(head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernels can compute attention with heads of this size."""
    return head_dim % 2 == 0 and head_dim <= _MAX_HEAD_DIM and dtype in DTYPES


class _NativeKernels(NativeStep):
    """What the kernels' arguments are made of."""

    def __init__(self, spec: AttentionSpec, kv: KVTensors) -> None:
        super().__init__()
        self._heads = spec.heads
        self._kv = kv
        self._windows = [window or 0 for window in spec.windows]
        no_norm, no_sinks = torch.empty(0, 0, dtype=spec.dtype), torch.empty(0)
        self._norms = [
            no_norm if weight_NH is None else spec.copies(weight_NH.contiguous) for weight_NH in spec.qk_norms_NH
        ]
        self._eps = spec.norm_eps
        self._norm_offset = spec.norm_offset
        self._cosines_and_sines_PH = [rope.cosines_and_sines() for rope in spec.ropes]
        self._scale = spec.scale
        self._softcap = spec.softcap or 0.0
        self._sinks = [no_sinks if sinks_N is None else spec.copies(sinks_N.float) for sinks_N in spec.sinks_N]


class NativeAttention(_NativeKernels):
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, spec: AttentionSpec, kv: KVTensors) -> None:
        super().__init__(spec, kv)
        self._attend = torch.ops.raycore.attention.default
        self._ropes = spec.ropes
        self._turns_TH: dict[Rope, Tensor] = {}
        """Of the step's tokens, if each is rotated by three positions."""
        self._no_ends = self._ends_T = torch.empty(0, dtype=torch.int32)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        super().begin(step, tensors)
        if tensors.axes_T3 is not None:
            self._turns_TH = {rope: rope.cosines_and_sines_of(tensors.axes_T3) for rope in set(self._ropes)}
        self._ends_T = self._no_ends if tensors.ends_T is None else tensors.ends_T

    def step_tensors(self) -> tuple[Tensor, Tensor] | None:
        """Return the tensors that the kernels get of this step only. None: there are others than in most steps."""
        is_usual = not self._turns_TH and self._ends_T is self._no_ends
        return (self._tables, self._sequences) if is_usual else None

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        turns_are_of_rows = bool(self._turns_TH)
        return self._attend(
            qkv_TO,
            self._norms[layer],
            self._eps,
            self._norm_offset,
            self._turns_TH[self._ropes[layer]] if turns_are_of_rows else self._cosines_and_sines_PH[layer],
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
            turns_are_of_rows,
            self._ends_T,
        )


class NativePartialAttention(_NativeKernels):
    """Attention to one worker's share of the keys and values. Implements `PartialAttention`.

    A head's part has H sums of weighted values, the highest exponent of 2 among the weights, and the sum of the weights
    relative to it.
    """

    def __init__(self, spec: AttentionSpec, kv: KVTensors, share: ContextShare) -> None:
        super().__init__(spec, kv)
        self._share = share
        self._like = torch.empty(0, dtype=spec.dtype)
        self._store = torch.ops.raycore.store_owned_keys.default
        self._attend = torch.ops.raycore.attend_to_owned_keys.default
        self._merge = torch.ops.raycore.merge_parts.default

    def store(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize and rotate queries and keys in place, and store the worker's share of keys and values."""
        self._store(
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
            self._share.size,
            self._share.index,
        )

    def attend(self, layer: int, q_TX: Tensor) -> Tensor:
        """Return parts of attention, float32[T, heads · (H + 2)]."""
        return self._attend(
            q_TX,
            self._kv.blocks[layer],
            self._tables,
            self._sequences,
            q_TX.shape[1] // self._heads.head_dim,
            self._heads.num_kv_heads,
            self._kv.block_size,
            self._windows[layer],
            self._scale,
            self._softcap,
            self._share.size,
            self._share.index,
        )

    def merge(self, layer: int, parts_PTX: Tensor) -> Tensor:
        """Return attention to all keys, [T, query heads · H]."""
        parts_PTNX = parts_PTX.view(*parts_PTX.shape[:2], self._heads.num_heads, -1)
        return self._merge(parts_PTNX, self._sinks[layer], self._like)
