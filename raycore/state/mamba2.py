"""Mamba-2's recurrence in plain torch.

Shape suffixes: those of `raycore.state.spec`, and L tokens of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.kernels import Backend
from raycore.state.native import NativeMamba2
from raycore.state.recurrence import MatrixRecurrence
from raycore.state.spec import Mamba2Kernels, Mamba2Layer, Mamba2Shape, StateStep
from raycore.state.torch_recurrence import TorchRecurrence, decays
from raycore.state.torch_step import TorchSteps, by_token, softplus


class Mamba2Recurrence(MatrixRecurrence):
    """Computes layers of Mamba-2."""

    layer = Mamba2Layer

    def kernels(self, by: Backend, *, batch_invariant: bool) -> Mamba2Kernels:
        own = self._own
        shape = Mamba2Shape(own.num_groups, own.num_v_heads, own.k_dim, own.v_dim, own.conv_size)
        if by == "native":
            return NativeMamba2(shape)
        if by == "triton":
            from raycore.state.gpu import TritonMamba2  # imports Triton, which only GPUs need

            return TritonMamba2(shape)
        return TorchMamba2(shape, batch_invariant=batch_invariant)


class TorchMamba2:
    """Computes Mamba-2's recurrence.

    `batch_invariant`: make the bits of each token's result independent of the step's other sequences, and of how its
    prompt is divided into steps.
    """

    def __init__(self, shape: Mamba2Shape, *, batch_invariant: bool = False) -> None:
        self._shape = shape
        self._batch_invariant = batch_invariant
        self._steps = TorchSteps(shape.conv_size)
        self._compute = TorchRecurrence(_update, _update_by_chunk, batch_invariant)

    def __call__(self, layer: Mamba2Layer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        shape, invariant, num_tokens = self._shape, self._batch_invariant, len(x_TX)
        indexes = self._steps.of(step, x_TX)
        x_TC, times_TN = torch.split(x_TX, [shape.num_channels, shape.num_heads], 1)
        y_TC = indexes.convolve(
            x_TC, layer.conv_CW, layer.conv_bias_C, layer.conv_states_RCW, batch_invariant=invariant
        )
        group_size = shape.num_groups * shape.k_dim
        v_TX, k_TX, q_TX = torch.split(y_TC, [shape.num_heads * shape.v_dim, group_size, group_size], 1)
        v_TNH = v_TX.view(num_tokens, shape.num_heads, shape.v_dim)
        times_TN = by_token(softplus, times_TN.float() + layer.bias_N, batch_invariant=invariant)
        times_TN = times_TN.clamp_(shape.least_time, shape.longest_time)
        inputs_TN = (
            self._for_heads(q_TX),
            self._for_heads(k_TX),
            v_TNH * times_TN[:, :, None],
            times_TN * -layer.decay_N.exp(),
        )
        out_TNH = self._compute(layer.states_RNKH, indexes, inputs_TN).add_(v_TNH * layer.skip_N[:, None])
        return out_TNH.view(num_tokens, shape.num_heads * shape.v_dim).to(x_TX.dtype)

    def _for_heads(self, x_TX: Tensor) -> Tensor:
        """Repeat groups for their heads. Returns [T, N, K]."""
        x_TGK = x_TX.view(len(x_TX), self._shape.num_groups, self._shape.k_dim)
        return x_TGK.repeat_interleave(self._shape.num_heads // self._shape.num_groups, 1)


def _update(state_NKH: Tensor, q_NK: Tensor, k_NK: Tensor, v_NH: Tensor, decay_N: Tensor) -> Tensor:
    """Update the states of some heads by one token each. Returns the results [N, H].

    `v_NH`: times the token's time. `decay_N`: the logarithms of what states are multiplied by.
    """
    state_NKH.mul_(decay_N.exp()[:, None, None]).addcmul_(k_NK[:, :, None], v_NH[:, None])
    return torch.bmm(q_NK[:, None], state_NKH)[:, 0]


def _update_by_chunk(state_NKH: Tensor, q_NLK: Tensor, k_NLK: Tensor, v_NLH: Tensor, decay_NL: Tensor) -> Tensor:
    """Update the states of some heads by the tokens of a chunk. Returns the results [N, L, H]."""
    kept_NL1, between_NLL = decays(decay_NL)
    keys_NKL = k_NLK.transpose(1, 2)
    scores_NLL = torch.bmm(q_NLK, keys_NKL).mul_(between_NLL)
    out_NLH = torch.bmm(q_NLK, state_NKH).mul_(kept_NL1).baddbmm_(scores_NLL, v_NLH)
    state_NKH.mul_(kept_NL1[:, -1:]).baddbmm_(keys_NKL * between_NLL[:, None, -1], v_NLH)
    return out_NLH
