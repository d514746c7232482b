"""Rotary position embedding (RoPE), with the scalings that checkpoints use.

A head's two halves are interleaved: component i is followed by component i + H/2, with which it is rotated. Such a pair
is one complex number, and the whole rotation is one complex multiplication. Attention scores don't change if the
components of queries and keys are permuted alike. So it is enough to apply `interleave` to the rows of the query and
key projections, when the weights are loaded.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raycore.checkpoint.model_spec import ModelSpec, RopeScaling


def interleave(heads_NHX: Tensor) -> Tensor:
    """Return a copy of [num_heads, H, ...] with dimension 1 reordered from halves to pairs: 0, H/2, 1, H/2 + 1, ..."""
    head_dim = heads_NHX.shape[1]
    order = torch.arange(head_dim, device=heads_NHX.device).view(2, -1).t().reshape(-1)
    return heads_NHX.index_select(1, order)


def separate(heads_NHX: Tensor) -> Tensor:
    """The inverse of `interleave`: return a copy with dimension 1 reordered from pairs to halves."""
    head_dim = heads_NHX.shape[1]
    order = torch.arange(head_dim, device=heads_NHX.device).view(-1, 2).t().reshape(-1)
    return heads_NHX.index_select(1, order)


class Rope:
    """The rotations of the positions below `max_positions`."""

    def __init__(self, spec: ModelSpec, max_positions: int, device: torch.device) -> None:
        frequencies, scale = _frequencies(spec.rope_theta, spec.head_dim, spec.rope_scaling)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
        turns = torch.complex(angles.cos() * scale, angles.sin() * scale)
        self._turns_P1C = turns.unsqueeze(1).to(device)

    def turns(self, positions_T: Tensor) -> Tensor:
        """Return the rotations of these positions for `rotate_`, as complex [T, 1, H/2]."""
        return self._turns_P1C.index_select(0, positions_T)

    def cosines_and_sines(self) -> Tensor:
        """Return float32[max_positions, H]: by position, the cosine and then the sine of each pair's angle."""
        return torch.view_as_real(self._turns_P1C).flatten(1)


def rotate_(heads_TNH: Tensor, turns_T1C: Tensor) -> Tensor:
    """Rotate interleaved heads in place, computing in float32 whatever their dtype. Returns `heads_TNH`."""
    if heads_TNH.dtype == torch.float32:
        heads_TNH.view(torch.complex64).mul_(turns_T1C)
        return heads_TNH
    wide_TNH = heads_TNH.float()
    wide_TNH.view(torch.complex64).mul_(turns_T1C)
    return heads_TNH.copy_(wide_TNH)


def _frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> tuple[Tensor, float]:
    """Return the angle per position, in radians, of each pair (float32[H/2]), and the factor on cos and sin."""
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(theta, head_dim, scaling), scaling.attention_factor


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Return frequencies with Llama 3.1's scaling: low ones are divided by the factor, high ones are kept.

    In between, the two are blended linearly.
    """
    old_length = scaling.original_max_position_embeddings
    turns_in_old_length = old_length / (2 * math.pi / plain)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns_in_old_length - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / scaling.factor + kept * plain


def _yarn(theta: float, head_dim: int, scaling: RopeScaling) -> Tensor:
    """Return frequencies with YaRN's scaling: equations 22 and 23 ("NTK-by-parts") of the paper (arXiv 2309.00071)."""

    def dimension(num_turns: float) -> float:
        old_length = scaling.original_max_position_embeddings
        return head_dim * math.log(old_length / (num_turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    wavelengths = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    return stretched / (scaling.factor * wavelengths) + (1 - stretched) / wavelengths
