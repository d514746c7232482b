"""Mamba-2's recurrence: its definition, and its kernels in plain torch.

Shape suffixes: those of `raycore.state.spec`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from raycore.kernels import Backend
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.state.recurrence import MatrixRecurrence
from raycore.state.spec import StateStep
from raycore.state.torch_recurrence import TorchRecurrence, add_products, add_products_by_chunk
from raycore.state.torch_step import TorchSteps, by_token, softplus


@dataclass(slots=True, frozen=True)
class Mamba2Layer:
    """What a layer of Mamba-2 has beside its projections, and its states."""

    conv_CW: Tensor
    """The taps of each channel, the oldest first. In the model's data type."""
    conv_bias_C: Tensor | None
    """Is added to the convolution. In the model's data type."""
    decay_N: Tensor
    """float32: `A_log`."""
    bias_N: Tensor
    """float32: `dt_bias`."""
    skip_N: Tensor
    """float32: `D`."""
    conv_states_RCW: Tensor
    """[R, C, W - 1]: the last inputs of the convolution, the oldest first, before its activation."""
    states_RNKH: Tensor
    """float32[R, N, K, H]. Checkpoints and papers have them the other way round, as H by K."""


class TorchMamba2:
    """Computes Mamba-2's recurrence.

    `batch_invariant`: make the bits of each token's result independent of the step's other sequences, and of how its
    prompt is divided into steps.
    """

    def __init__(self, shape: Mamba2Spec, *, batch_invariant: bool = False) -> None:
        self._shape = shape
        self._batch_invariant = batch_invariant
        self._steps = TorchSteps(shape.conv_size)
        self._compute = TorchRecurrence(add_products, add_products_by_chunk, batch_invariant)

    def __call__(self, layer: Mamba2Layer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        shape, invariant, num_tokens = self._shape, self._batch_invariant, len(x_TX)
        indexes = self._steps.of(step, x_TX)
        x_TC, times_TN = torch.split(x_TX, [shape.num_channels, shape.num_v_heads], 1)
        y_TC = indexes.convolve(x_TC, layer.conv_CW, layer.conv_bias_C, layer.conv_states_RCW)
        y_TC = by_token(functional.silu, y_TC, batch_invariant=invariant)
        group_size = shape.num_groups * shape.k_dim
        v_TX, k_TX, q_TX = torch.split(y_TC, [shape.num_values, group_size, group_size], 1)
        v_TNH = v_TX.view(num_tokens, shape.num_v_heads, shape.v_dim)
        times_TN = by_token(softplus, times_TN.float() + layer.bias_N, batch_invariant=invariant)
        times_TN = times_TN.clamp_(shape.least_time, shape.longest_time)
        inputs_TN = (
            self._for_heads(q_TX),
            self._for_heads(k_TX),
            v_TNH * times_TN[:, :, None],
            times_TN * -layer.decay_N.exp(),
        )
        out_TNH = self._compute(layer.states_RNKH, indexes, inputs_TN).add_(v_TNH * layer.skip_N[:, None])
        return out_TNH.view(num_tokens, shape.num_values).to(x_TX.dtype)

    def _for_heads(self, x_TX: Tensor) -> Tensor:
        """Repeat groups for their heads. Returns [T, N, K]."""
        x_TGK = x_TX.view(len(x_TX), self._shape.num_groups, self._shape.k_dim)
        return x_TGK.repeat_interleave(self._shape.num_v_heads // self._shape.num_groups, 1)


class Mamba2Recurrence(MatrixRecurrence):
    """Computes layers of Mamba-2.

    x_TX has, for each token, the channels C of x, B and C, then the times dt of the N heads. Channels go through the
    convolution and SiLU. For each token, with a state S of [K, H] for each head, which begins as zeros,

        dt ← softplus(dt + bias), in the range of the times
        S ← exp(-exp(decay) · dt) · S + B ⊗ (dt · x)
        output = Sᵀ C + skip · x

    in float32. Source: Transformers are SSMs (https://arxiv.org/abs/2405.21060), section 7.
    """

    layer = Mamba2Layer
    by_torch = TorchMamba2
    others: ClassVar[Mapping[Backend, str]] = {
        "native": "raycore.state.native.NativeMamba2",
        "triton": "raycore.state.gpu.TritonMamba2",
    }
