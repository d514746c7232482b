"""Attention of a step's tokens to those of their own prompts, on both sides. Nothing is kept after the step.

Shape suffixes: T tokens of the step, N heads, H elements of a head, O fused query, key and value rows, B prompts of a
group, L tokens of its longest prompt, C components of a head in pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from raycore.attention.native import supports_heads
from raycore.attention.spec import Attention
from raycore.layers.rope import Rope, rotate_
from raycore.models.spec import ModelSpec
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors

NumSeen = Callable[[StepInputs], Ints]
"""Returns of each prompt of a step how many of its first tokens others see."""
_LEAST_FILLED = 0.75
"""Prompts are padded to a common length if at least so much of the longest one is filled."""


@dataclass(slots=True, frozen=True)
class EncoderHeads:
    """One rank's attention heads, and what is done to queries and keys before attention."""

    num_heads: int
    head_dim: int
    scale: float
    """Scores are multiplied by it."""
    reaches: list[int | None]
    """By layer: how many tokens before its own, and after it, a token sees. None: all of the prompt."""
    ropes: list[Rope | None]
    """By layer. Layers with the same rotations have the same object. None: nothing is rotated."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls, spec: ModelSpec, tp_size: int, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> EncoderHeads:
        """Return the heads of one of `tp_size` ranks. `max_length`: maximum number of tokens of a prompt."""
        assert spec.encoder is not None, "it is an encoder"
        made = {
            rotation: None if rotation is None else Rope(rotation, spec.head_dim, max_length, device)
            for rotation in set(spec.rotations)
        }
        return cls(
            spec.num_heads // tp_size,
            spec.head_dim,
            1.0 / math.sqrt(spec.head_dim) if spec.attention_scale is None else spec.attention_scale,
            spec.encoder.reaches,
            [made[rotation] for rotation in spec.rotations],
            dtype,
            device,
        )


class TorchEncoderAttention:
    """`Attention` in plain torch: prompts of about the same length are padded and computed together."""

    def __init__(self, heads: EncoderHeads, *, batch_invariant: bool = False, num_seen: NumSeen | None = None) -> None:
        """
        Args:
            batch_invariant: compute each prompt by itself, so that its bits don't depend on other prompts.
            num_seen: see `make_attention`.
        """
        self._num_seen = num_seen or _all_seen
        self._heads = heads
        self._least_filled = 2.0 if batch_invariant else _LEAST_FILLED
        self._groups: list[_Group] = []
        self._turns: dict[Rope, Tensor] = {}

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, which has whole prompts."""
        seen = self._num_seen(step)
        device = self._heads.device
        reaches = set(self._heads.reaches)
        self._groups = [
            _Group.of(rows, reaches, device, seen[indexes])
            for indexes, rows in _padded_rows(step.first_rows, step.counts, self._least_filled)
        ]
        ropes = {rope for rope in self._heads.ropes if rope is not None}
        self._turns = {rope: rope.turns(tensors.positions_T) for rope in ropes}

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, N · H]. Overwrites `qkv_TO`."""
        num_heads, head_dim = self._heads.num_heads, self._heads.head_dim
        rope = self._heads.ropes[layer]
        if rope is not None:
            rotate_(qkv_TO.view(len(qkv_TO), -1, head_dim)[:, : 2 * num_heads], self._turns[rope])
        out_TX = qkv_TO.new_empty(len(qkv_TO), num_heads * head_dim)
        for group in self._groups:
            qkv_BLX = qkv_TO.index_select(0, group.rows_X).view(*group.shape, -1)
            q, k, v = (
                each.view(*group.shape, num_heads, head_dim).transpose(1, 2) for each in qkv_BLX.chunk(3, dim=-1)
            )
            mask = group.masks[self._heads.reaches[layer]]
            out_BNLH = functional.scaled_dot_product_attention(q, k, v, mask, scale=self._heads.scale)
            out_BLX = out_BNLH.transpose(1, 2).reshape(-1, out_TX.shape[1])
            if group.kept_Y is not None:
                out_BLX = out_BLX.index_select(0, group.kept_Y)
            out_TX.index_copy_(0, group.own_Y, out_BLX)
        return out_TX


class NativeEncoderAttention:
    """`Attention` by native kernels for CPUs, for all prompts together. A token's bits depend on no other prompt."""

    def __init__(self, heads: EncoderHeads) -> None:
        self._heads = heads
        no_turns = torch.empty(0)
        self._turns = [no_turns if rope is None else rope.cosines_and_sines() for rope in heads.ropes]
        self._windows = [0 if reach is None else reach + 1 for reach in heads.reaches]
        self._sequences = torch.empty(0)
        self._attend = torch.ops.raycore.two_sided_attention.default

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, which has whole prompts."""
        indexes = np.arange(len(step.counts))
        sequences = np.stack([indexes, step.first_rows, step.counts, step.starts], axis=1)
        self._sequences = torch.as_tensor(sequences.astype(np.int32))

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, N · H]. Rotates queries and keys in place."""
        return self._attend(
            qkv_TO,
            self._turns[layer],
            self._sequences,
            self._heads.num_heads,
            self._windows[layer],
            self._heads.scale,
        )


class _Group(NamedTuple):
    """Prompts that are computed together."""

    shape: tuple[int, int]
    """B and L."""
    rows_X: Tensor
    """int64[B · L]: each place's row among the step's tokens. Padding has any row."""
    own_Y: Tensor
    """int64[Y]: the rows of places that aren't padding."""
    kept_Y: Tensor | None
    """int64[Y]: these places. None: none is padding."""
    masks: dict[int | None, Tensor | None]
    """By reach: bool[B or 1, 1, L or 1, L], which tokens a token sees. None: all."""

    @classmethod
    def of(cls, rows_BL: Ints, reaches: set[int | None], device: torch.device, seen_B: Ints) -> _Group:
        """Return a group.

        Args:
            rows_BL: each place's row among the step's tokens, or -1.
            seen_B: how many of each prompt's first tokens others see.
        """
        rows = rows_BL.ravel()
        is_real = rows >= 0
        is_full = bool(is_real.all())
        kept = None if is_full else to_device(np.flatnonzero(is_real), device)
        masks = {reach: _mask(rows_BL.shape[1], seen_B, reach, device) for reach in reaches}
        own = to_device(rows[is_real], device)
        return cls(rows_BL.shape, to_device(np.maximum(rows, 0), device), own, kept, masks)


def _mask(length: int, seen_B: Ints, reach: int | None, device: torch.device) -> Tensor | None:
    places: Ints = np.arange(length)
    is_seen = (places < seen_B[:, None])[:, None, None, :]
    if reach is None:
        return None if is_seen.all() else to_device(is_seen, device)
    distances = np.abs(places[:, None] - places[None, :])
    is_seen = (distances <= reach) & is_seen
    # a place that sees no other sees itself, because a softmax of nothing would be NaN
    return to_device(is_seen | (~is_seen.any(axis=3, keepdims=True) & (distances == 0)), device)


def _padded_rows(first_rows: Ints, counts: Ints, least_filled: float) -> Iterator[tuple[Ints, Ints]]:
    """Yield groups of prompts: their indexes [B], and the rows of their tokens, [B, L], or -1 after a prompt's end."""
    order = np.argsort(-counts, kind="stable")
    start = 0
    while start < len(order):
        longest = int(counts[order[start]])
        end = start + 1
        while end < len(order) and counts[order[end]] >= least_filled * longest:
            end += 1
        own = order[start:end]
        places = np.arange(longest)[None, :]
        yield own, np.where(places < counts[own][:, None], first_rows[own][:, None] + places, -1)
        start = end


def _all_seen(step: StepInputs) -> Ints:
    return step.counts


def make_attention(
    heads: EncoderHeads, *, is_native: bool = False, batch_invariant: bool = False, num_seen: NumSeen | None = None
) -> Attention:
    """Return what computes attention.

    Args:
        is_native: whether native kernels may compute it.
        batch_invariant: make the bits of a prompt's results independent of other prompts.
        num_seen: how many of their first tokens others see. None: all. Native kernels have no such limit.
    """
    if is_native and num_seen is None and supports_heads(heads.head_dim, heads.dtype):
        return NativeEncoderAttention(heads)
    return TorchEncoderAttention(heads, batch_invariant=batch_invariant, num_seen=num_seen)
