"""Mamba-2's recurrence by definition."""

from __future__ import annotations

import torch
from native_kernels import randn
from state_contract import Sizes, convolved
from torch import Tensor
from torch.nn import functional

from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.state.mamba2 import Mamba2Layer


class Mamba2Rule:
    """Mamba-2's recurrence. Its options are a bias of the convolution, and limits of the times."""

    def shape(self, sizes: Sizes) -> Mamba2Spec:
        limits = (0.3, 2.0) if sizes.has_options else ()
        heads = sizes.num_v_heads, sizes.k_dim, sizes.v_dim
        return Mamba2Spec([True], *heads, sizes.conv_size, sizes.num_k_heads, sizes.has_options, *limits)

    def width(self, shape: Mamba2Spec) -> int:
        return shape.num_channels + shape.num_v_heads

    def layer(self, sizes: Sizes, shape: Mamba2Spec, conv_states_RCW: Tensor, states_RNKH: Tensor) -> Mamba2Layer:
        return Mamba2Layer(
            (randn(sizes.seed + 3, shape.num_channels, shape.conv_size) / 2).to(sizes.dtype),
            randn(sizes.seed + 7, shape.num_channels).to(sizes.dtype) if sizes.has_options else None,
            randn(sizes.seed + 4, shape.num_v_heads) + sizes.decay,
            randn(sizes.seed + 5, shape.num_v_heads),
            randn(sizes.seed + 8, shape.num_v_heads),
            conv_states_RCW,
            states_RNKH,
        )

    def one_token(
        self, shape: Mamba2Spec, layer: Mamba2Layer, conv_CW: Tensor, state_NKH: Tensor, x_X: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        conv_CW, y_C = convolved(layer, conv_CW, x_X)
        num_heads, group = shape.num_v_heads, shape.num_v_heads // shape.num_groups
        x_NH = y_C[: num_heads * shape.v_dim].view(num_heads, shape.v_dim)
        b_NK, c_NK = y_C[num_heads * shape.v_dim :].view(2, shape.num_groups, shape.k_dim).repeat_interleave(group, 1)
        times_N = functional.softplus(x_X[shape.num_channels :] + layer.bias_N.double())
        times_N = times_N.clamp(shape.least_time, shape.longest_time)
        state_NKH = state_NKH * (-layer.decay_N.double().exp() * times_N).exp()[:, None, None]
        state_NKH = state_NKH + b_NK[:, :, None] * (times_N[:, None] * x_NH)[:, None]
        out_NH = torch.einsum("nkh,nk->nh", state_NKH, c_NK) + layer.skip_N.double()[:, None] * x_NH
        return conv_CW, state_NKH, out_NH.flatten()


MAMBA2 = Mamba2Rule()
