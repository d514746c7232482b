"""The gated delta rule by definition."""

from __future__ import annotations

import math

import torch
from native_kernels import randn
from state_contract import Sizes, convolved
from torch import Tensor
from torch.nn import functional

from raycore.models.mixers.delta import DeltaSpec
from raycore.state.delta import DeltaLayer


class DeltaRule:
    """The gated delta rule. It has no options."""

    def __init__(self, largest_share: float = 1.0) -> None:
        self._largest_share = largest_share

    def shape(self, sizes: Sizes) -> DeltaSpec:
        return DeltaSpec(
            [True],
            *(sizes.num_v_heads, sizes.k_dim, sizes.v_dim, sizes.conv_size),
            num_k_heads=sizes.num_k_heads,
            is_interleaved=False,
            largest_share=self._largest_share,
        )

    def width(self, shape: DeltaSpec) -> int:
        return shape.num_channels + 2 * shape.num_v_heads

    def layer(self, sizes: Sizes, shape: DeltaSpec, conv_states_RCW: Tensor, states_RNKH: Tensor) -> DeltaLayer:
        return DeltaLayer(
            randn(sizes.seed + 3, shape.num_channels, shape.conv_size).to(sizes.dtype),
            randn(sizes.seed + 4, shape.num_v_heads) + sizes.decay,
            randn(sizes.seed + 5, shape.num_v_heads),
            conv_states_RCW,
            states_RNKH,
        )

    def one_token(
        self, shape: DeltaSpec, layer: DeltaLayer, conv_CW: Tensor, state_NKH: Tensor, x_X: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        conv_CW, y_C = convolved(layer, conv_CW, x_X)
        num_heads, group = shape.num_v_heads, shape.num_v_heads // shape.num_k_heads
        q_GK, k_GK = y_C[: 2 * shape.num_k_heads * shape.k_dim].view(2, shape.num_k_heads, shape.k_dim)
        q_NK, k_NK = (
            (x_GK / (x_GK.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 0)
            for x_GK in (q_GK, k_GK)
        )
        v_NH = y_C[2 * shape.num_k_heads * shape.k_dim :].view(num_heads, shape.v_dim)
        b_N, a_N = x_X[shape.num_channels :].view(2, num_heads)
        decays_N = (-layer.decay_N.double().exp() * functional.softplus(a_N + layer.bias_N.double())).exp()
        state_NKH = state_NKH * decays_N[:, None, None]
        change_NH = (v_NH - torch.einsum("nkh,nk->nh", state_NKH, k_NK)) * b_N.sigmoid()[:, None]
        change_NH = change_NH * self._largest_share
        state_NKH = state_NKH + k_NK[:, :, None] * change_NH[:, None]
        out_NH = torch.einsum("nkh,nk->nh", state_NKH, q_NK) / math.sqrt(shape.k_dim)
        return conv_CW, state_NKH, out_NH.flatten()


DELTA = DeltaRule()
TURNING_DELTA = DeltaRule(2.0)
"""Its states may be turned over."""
