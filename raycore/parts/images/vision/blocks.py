"""The layers of encoders of images.

Shape suffixes: P patches, D hidden size, N heads of the rank, H elements of a head, C pairs of these, W windows, L
patches of a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from raycore.layers.linear import Linear
from raycore.layers.operations import Norm, Operations
from raycore.layers.rope import PairOrder, rotate_
from raycore.models.rotation import Rotation
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.images.models import VisionSpec
from raycore.parts.images.weights import VisionWeights


@dataclass
class VisionParts:
    """What the layers of an encoder are made of."""

    spec: VisionSpec
    weights: VisionWeights
    operations: Operations
    ranks: TensorParallel
    """Those that divide the encoder. A single one, if each rank has all of it."""

    def weight(self, key: str) -> Tensor:
        """Return a weight on the device."""
        return self.weights[key].to(self.operations.device)

    def linear(self, key: str, *, is_split: bool = False) -> Linear:
        """Return a linear layer. `is_split`: its input is divided over the ranks, whose results are summed."""
        bias_O = self.weights[f"{key}.bias"]
        ranks = self.ranks if is_split else None
        return self.operations.linear(self.weights[f"{key}.weight"], bias_O if bias_O.numel() else None, ranks)

    def norm(self, key: str) -> Norm:
        """Return a layer norm, or an RMS norm if there is no bias."""
        weight, bias = self.weights[f"{key}.weight"], self.weights.get(f"{key}.bias")
        if bias is None:
            return self.operations.rms_norm(weight, self.spec.norm_eps)
        return self.operations.layer_norm(weight, bias, self.spec.norm_eps)

    def activated(self, key: str) -> Callable[[Tensor], Tensor]:
        """Return a linear layer with the encoder's activation after it."""
        weight, bias = self.weights[f"{key}.weight"], self.weights[f"{key}.bias"]
        return self.operations.activated_linear(weight, bias, self.spec.activation)

    def gated(self, gate: str, up: str) -> Callable[[Tensor], Tensor]:
        """Return a gated layer with the encoder's activation."""
        weight, bias = (torch.cat([self.weights[f"{key}.{each}"] for key in (gate, up)]) for each in ("weight", "bias"))
        return self.operations.gated_linear(weight, bias, gate=self.spec.activation)


class VisionAttention:
    """Attention of patches to those of the same window."""

    def __init__(self, parts: VisionParts, qkv: Linear, out: Linear) -> None:
        """`qkv`: returns the queries of the rank's heads, then their keys, then their values."""
        self._num_heads = parts.spec.num_heads // parts.ranks.size
        self._head_dim = parts.spec.hidden_size // parts.spec.num_heads
        self._qkv = qkv
        self._out = out

    def add_to(self, h_PD: Tensor, x_PD: Tensor, turns_P1C: Tensor | None, windows: list[Tensor]) -> Tensor:
        """Return `h_PD` plus the result of attention for `x_PD`. May overwrite `h_PD`.

        Args:
            turns_P1C: the rotations of queries and keys. None: they aren't rotated.
            windows: the patches of each window, in groups of equal size, [W, L].
        """
        qkv_PXNH = self._qkv(x_PD).view(len(x_PD), 3, self._num_heads, self._head_dim)
        if turns_P1C is not None:
            rotate_(qkv_PXNH[:, :2].flatten(1, 2), turns_P1C)
        out_PX = x_PD.new_empty(len(x_PD), self._num_heads * self._head_dim)
        for patches_WL in windows:
            q, k, v = qkv_PXNH[patches_WL].permute(2, 0, 3, 1, 4)
            out_WNLH = functional.scaled_dot_product_attention(q, k, v, scale=1.0 / math.sqrt(self._head_dim))
            out_PX[patches_WL.view(-1)] = out_WNLH.transpose(1, 2).reshape(patches_WL.numel(), -1)
        return self._out.add_to(h_PD, out_PX)


class VisionBlock:
    """One layer of an encoder: attention, then a feed-forward part, each with a norm before it."""

    def __init__(
        self,
        norms: tuple[Norm, Norm],
        attention: VisionAttention,
        up: Callable[[Tensor], Tensor],
        down: Linear,
    ) -> None:
        self._norms = norms
        self._attention = attention
        self._up = up
        self._down = down

    def __call__(self, h_PD: Tensor, turns_P1C: Tensor | None, windows: list[Tensor]) -> Tensor:
        """Return the layer's output for hidden states, which it overwrites. The others: see `VisionAttention`."""
        h_PD = self._attention.add_to(h_PD, self._norms[0](h_PD), turns_P1C, windows)
        return self._down.add_to(h_PD, self._up(self._norms[1](h_PD)))


class GridRotation:
    """Rotates the first half of a head's pairs by the row of a patch, and the other half by its column."""

    def __init__(self, theta: float, head_dim: int) -> None:
        self._order = PairOrder(Rotation(theta), head_dim)
        self._head_dim = head_dim
        self._frequencies_C = 1.0 / theta ** (torch.arange(0, head_dim // 2, 2).float() / (head_dim // 2))

    def in_pairs(self, qkv: Tensor) -> Tensor:
        """Return the weight or the bias of queries, keys and values, with those of a pair side by side."""
        heads_NHX = qkv.reshape(-1, self._head_dim, *qkv.shape[1:])
        num_rotated = len(heads_NHX) // 3 * 2
        return torch.cat([self._order.pairs(heads_NHX[:num_rotated]), heads_NHX[num_rotated:]]).reshape(qkv.shape)

    def turns(self, rows_P: Tensor, columns_P: Tensor) -> Tensor:
        """Return the rotations of patches for `rotate_`, as complex [P, 1, H / 2]."""
        angles_PC = torch.cat([each[:, None] * self._frequencies_C for each in (rows_P, columns_P)], 1)
        return torch.polar(torch.ones_like(angles_PC), angles_PC).unsqueeze(1)
