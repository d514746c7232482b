"""Rotary position embedding (RoPE), with the scalings that checkpoints use.

Components of a head that are rotated with each other are brought next to each other: such a pair is one complex number,
and the whole rotation is one complex multiplication. Attention scores don't change if the components of queries and
keys are permuted alike. So it is enough to apply `PairOrder` to the rows of the query and key projections, when the
weights are loaded. Pairs that a model doesn't rotate are turned by an angle of 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raycore.models.rotation import RopeScaling, Rotation


class PairOrder:
    """Brings the components of heads from a checkpoint's order to that of pairs, and back."""

    def __init__(self, rotation: Rotation | None, head_dim: int) -> None:
        """`rotation`: of the layer. None: nothing is rotated, and any order will do."""
        order = torch.arange(head_dim)
        if rotation is not None and not rotation.is_adjacent:
            num_rotated = rotation.num_components(head_dim)
            order[:num_rotated] = order[:num_rotated].view(2, -1).t().reshape(-1)
        self._order_H, self._inverse_H = order, order.argsort()

    def pairs(self, heads_NHX: Tensor) -> Tensor:
        """Return a copy of [num_heads, H, ...], as in a checkpoint, with dimension 1 in the order of pairs."""
        return heads_NHX.index_select(1, self._order_H.to(heads_NHX.device))

    def stored(self, heads_NHX: Tensor) -> Tensor:
        """Return a copy of [num_heads, H, ...], in the order of pairs, with dimension 1 as in a checkpoint."""
        return heads_NHX.index_select(1, self._inverse_H.to(heads_NHX.device))


class Rope:
    """The rotations of an engine's positions."""

    def __init__(self, rotation: Rotation | None, head_dim: int, max_length: int, device: torch.device) -> None:
        """
        Args:
            rotation: None turns nothing.
            max_length: maximum number of tokens of a sequence. One more may be sampled beyond the longest one.
        """
        self._axes_C: Tensor | None = None
        """By pair: which of three positions rotates it. None: there is one."""
        max_positions = max_length + 1
        cosines_PC, sines_PC = torch.ones(max_positions, head_dim // 2), torch.zeros(max_positions, head_dim // 2)
        if rotation is not None:
            num_rotated = rotation.num_components(head_dim)
            frequencies, scale = _frequencies(rotation.theta, num_rotated, rotation.scaling, max_length)
            frequencies[rotation.num_turned_pairs(head_dim) :] = 0.0
            angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
            cosines_PC[:, : num_rotated // 2] = angles.cos() * scale
            sines_PC[:, : num_rotated // 2] = angles.sin() * scale
            if rotation.sections:
                axes_C = torch.zeros(head_dim // 2, dtype=torch.int64)
                axes_C[: num_rotated // 2] = torch.tensor(rotation.axes())
                self._axes_C = axes_C.to(device)
        self._turns_P1C = torch.complex(cosines_PC, sines_PC).unsqueeze(1).to(device)

    def turns(self, positions: Tensor) -> Tensor:
        """Return the rotations of these positions, [T], or [T, 3], for `rotate_`, as complex [T, 1, H/2]."""
        if positions.dim() == 1:
            return self._turns_P1C.index_select(0, positions)
        assert self._axes_C is not None, "there is one position"
        return self._turns_P1C.squeeze(1).gather(0, positions.index_select(1, self._axes_C)).unsqueeze(1)

    def cosines_and_sines_of(self, positions: Tensor) -> Tensor:
        """Return float32[T, H]: what `cosines_and_sines` has, of these positions [T], or [T, 3]."""
        return torch.view_as_real(self.turns(positions)).flatten(1)

    def cosines_and_sines(self) -> Tensor:
        """Return float32[max_length + 1, H]: by position, the cosine and then the sine of each pair's angle."""
        return torch.view_as_real(self._turns_P1C).flatten(1)


def rotate_(heads_TNH: Tensor, turns_T1C: Tensor) -> Tensor:
    """Rotate heads in place, computing in float32 whatever their dtype. Returns `heads_TNH`.

    Their components are in the order of pairs.
    """
    if heads_TNH.dtype == torch.float32:
        heads_TNH.view(torch.complex64).mul_(turns_T1C)
        return heads_TNH
    wide_TNH = heads_TNH.float()
    wide_TNH.view(torch.complex64).mul_(turns_T1C)
    return heads_TNH.copy_(wide_TNH)


def _frequencies(theta: float, head_dim: int, scaling: RopeScaling | None, max_length: int) -> tuple[Tensor, float]:
    """Return the angle per position, in radians, of each pair (float32[H/2]), and the factor on cos and sin."""
    plain = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if scaling is None:
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.rope_type == "longrope":
        factors = torch.tensor(scaling.long_factors if scaling.is_long(max_length) else scaling.short_factors)
        return plain / factors, scaling.attention_factor
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
