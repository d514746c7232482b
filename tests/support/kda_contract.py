"""Kimi's delta attention by definition."""

from __future__ import annotations

import math

import torch
from native_kernels import randn
from state_contract import Sizes, convolved
from torch import Tensor
from torch.nn import functional

from raycore.models.mixers.kda import KdaSpec
from raycore.state.kda import KdaLayer


class KdaRule:
    """Kimi's delta attention. Its option is a limit of decays. Keys are as many, and as long, as values."""

    def shape(self, sizes: Sizes) -> KdaSpec:
        assert sizes.k_dim == sizes.v_dim
        limit = -3.0 if sizes.has_options else None
        return KdaSpec([True], sizes.num_v_heads, sizes.k_dim, sizes.v_dim, sizes.conv_size, least_decay=limit)

    def width(self, shape: KdaSpec) -> int:
        return shape.num_channels + shape.num_v_heads + shape.num_values

    def layer(self, sizes: Sizes, shape: KdaSpec, conv_states_RCW: Tensor, states_RNKH: Tensor) -> KdaLayer:
        return KdaLayer(
            randn(sizes.seed + 3, shape.num_channels, shape.conv_size).to(sizes.dtype),
            randn(sizes.seed + 4, shape.num_v_heads) + sizes.decay,
            randn(sizes.seed + 5, shape.num_values),
            conv_states_RCW,
            states_RNKH,
        )

    def one_token(
        self, shape: KdaSpec, layer: KdaLayer, conv_CW: Tensor, state_NKH: Tensor, x_X: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        conv_CW, y_C = convolved(layer, conv_CW, x_X)
        q_NK, k_NK, v_NH = y_C.view(3, shape.num_v_heads, shape.k_dim)
        q_NK, k_NK = (x_NK / (x_NK.square().sum(1, keepdim=True) + 1e-6).sqrt() for x_NK in (q_NK, k_NK))
        b_N, f_O = x_X[shape.num_channels :].split([shape.num_v_heads, shape.num_values])
        f_NK, rates_N1 = (f_O + layer.bias_O.double()).view(k_NK.shape), layer.decay_N.double().exp()[:, None]
        decays_NK = -rates_N1 * functional.softplus(f_NK)
        if shape.least_decay is not None:
            decays_NK = shape.least_decay * torch.sigmoid(rates_N1 * f_NK)
        state_NKH = state_NKH * decays_NK.exp()[:, :, None]
        change_NH = (v_NH - torch.einsum("nkh,nk->nh", state_NKH, k_NK)) * b_N.sigmoid()[:, None]
        state_NKH = state_NKH + k_NK[:, :, None] * change_NH[:, None]
        out_NH = torch.einsum("nkh,nk->nh", state_NKH, q_NK) / math.sqrt(shape.k_dim)
        return conv_CW, state_NKH, out_NH.flatten()


KDA = KdaRule()
