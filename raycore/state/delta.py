"""The gated delta rule: its definition, and its kernels in plain torch.

Shape suffixes: those of `raycore.state.spec`, L tokens of a chunk, and 1 for a dimension that is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from raycore.kernels import Backend
from raycore.layers.rows import on_one_thread
from raycore.models.mixers.delta import DeltaSpec
from raycore.state.recurrence import MatrixRecurrence
from raycore.state.spec import StateStep
from raycore.state.torch_recurrence import TorchRecurrence, decays
from raycore.state.torch_step import TorchStep, TorchSteps, by_token, softplus

EPS = 1e-6
"""Is added to the squared norms of queries and keys."""


@dataclass(slots=True, frozen=True)
class DeltaLayer:
    """What a layer with the gated delta rule has beside its projections, and its states."""

    conv_CW: Tensor
    """The taps of each channel, the oldest first. In the model's data type."""
    decay_N: Tensor
    """float32: `A_log`."""
    bias_N: Tensor
    """float32: `dt_bias`."""
    conv_states_RCW: Tensor
    """[R, C, W - 1]: the last inputs of the convolution, the oldest first, before its activation."""
    states_RNKH: Tensor
    """float32[R, N, K, H]."""


class TorchDelta:
    """Computes the gated delta rule.

    `batch_invariant`: make the bits of each token's result independent of the step's other sequences, and of how its
    prompt is divided into steps.
    """

    def __init__(self, shape: DeltaSpec, *, batch_invariant: bool = False) -> None:
        self._shape = shape
        self._batch_invariant = batch_invariant
        self._steps = TorchSteps(shape.conv_size)
        self._compute = TorchRecurrence(_update, _update_by_chunk, batch_invariant)

    def __call__(self, layer: DeltaLayer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        indexes = self._steps.of(step, x_TX)
        out_TNH = self._compute(layer.states_RNKH, indexes, self._inputs(layer, x_TX, indexes))
        return out_TNH.view(len(x_TX), self._shape.num_values).to(x_TX.dtype)

    def _inputs(self, layer: DeltaLayer, x_TX: Tensor, indexes: TorchStep) -> tuple[Tensor, ...]:
        """Return what the updates read: the arguments of `_update` for each token."""
        shape, invariant = self._shape, self._batch_invariant
        sizes = [shape.num_channels, shape.num_v_heads, shape.num_v_heads]
        x_TC, b_TN, a_TN = torch.split(x_TX, sizes, 1)
        y_TC = indexes.convolve(x_TC, layer.conv_CW, None, layer.conv_states_RCW)
        y_TC = by_token(functional.silu, y_TC, batch_invariant=invariant)
        key_size = shape.num_k_heads * shape.k_dim
        q_TX, k_TX, v_TX = torch.split(y_TC, [key_size, key_size, shape.num_values], 1)
        times_TN = by_token(softplus, a_TN.float() + layer.bias_N, batch_invariant=invariant)
        return (
            self._for_value_heads(q_TX).mul_(1.0 / math.sqrt(shape.k_dim)),
            self._for_value_heads(k_TX),
            v_TX.view(len(x_TX), shape.num_v_heads, shape.v_dim),
            by_token(torch.sigmoid, b_TN.float(), batch_invariant=invariant).mul_(shape.largest_share),
            times_TN * -layer.decay_N.exp(),
        )

    def _for_value_heads(self, x_TX: Tensor) -> Tensor:
        """Divide key heads by their norms, and repeat them for their value heads. Returns [T, N, K]."""
        x_TGK = x_TX.view(len(x_TX), self._shape.num_k_heads, self._shape.k_dim)
        normalized_TGK = on_one_thread(normalized, x_TGK) if self._batch_invariant else normalized(x_TGK)
        return normalized_TGK.repeat_interleave(self._shape.num_v_heads // self._shape.num_k_heads, 1)


class DeltaRecurrence(MatrixRecurrence):
    """Computes layers with the gated delta rule.

    x_TX has, for each token, the channels C of queries, keys and values, then `b`, N numbers, then `a`, N numbers.
    Channels go through the convolution and SiLU. Queries and keys are divided by their norms (eps 1e-6), and queries by
    sqrt(K). For each token, with a state S of [K, H] for each value head, which begins as zeros,

        S ← exp(-exp(decay) · softplus(a + bias)) · S
        S ← S + k ⊗ (largest share · sigmoid(b) · (v - Sᵀ k))
        output = Sᵀ q

    in float32. Source: Gated Delta Networks (https://arxiv.org/abs/2412.06464), equation 10. With a share of up to 2, a
    state may also be turned over: https://arxiv.org/abs/2411.12537.
    """

    layer = DeltaLayer
    by_torch = TorchDelta
    others: ClassVar[Mapping[Backend, str]] = {
        "native": "raycore.state.native.NativeDelta",
        "triton": "raycore.state.gpu.TritonDelta",
    }


solve = cast(
    Callable[[Tensor, Tensor], Tensor],
    partial(torch.linalg.solve_triangular, upper=False, unitriangular=True),  # pyright: ignore[reportUnknownMemberType]
)
"""Solves systems of equations, of which the first argument has the coefficients below the diagonal."""


def normalized(x_TGK: Tensor) -> Tensor:
    """Divide each head's vector by its norm."""
    return x_TGK / x_TGK.square().sum(-1, keepdim=True).add_(EPS).sqrt_()


def _update(state_NKH: Tensor, q_NK: Tensor, k_NK: Tensor, v_NH: Tensor, beta_N: Tensor, decay_N: Tensor) -> Tensor:
    """Update the states of some heads by one token each. Returns the results [N, H].

    `beta_N`: the fractions of values that are written. `decay_N`: the logarithms of what states are multiplied by.
    """
    state_NKH.mul_(decay_N.exp()[:, None, None])
    k_N1K = k_NK[:, None]
    change_N1H = (v_NH[:, None] - torch.bmm(k_N1K, state_NKH)).mul_(beta_N[:, None, None])
    state_NKH.addcmul_(k_NK[:, :, None], change_N1H)
    return torch.bmm(q_NK[:, None], state_NKH)[:, 0]


def _update_by_chunk(
    state_NKH: Tensor, q_NLK: Tensor, k_NLK: Tensor, v_NLH: Tensor, beta_NL: Tensor, decay_NL: Tensor
) -> Tensor:
    """Update the states of some heads by the tokens of a chunk. Returns the results [N, L, H].

    What a token writes depends on what the tokens before it have written: this is a triangular system of equations.
    Source: Gated Delta Networks (https://arxiv.org/abs/2412.06464), section 3.3.
    """
    kept_NL1, between_NLL = decays(decay_NL)
    keys_NKL = k_NLK.transpose(1, 2)
    system_NLL = torch.bmm(k_NLK, keys_NKL).mul_(between_NLL).mul_(beta_NL[:, :, None])
    changes_NLH = (v_NLH - torch.bmm(k_NLK, state_NKH).mul_(kept_NL1)).mul_(beta_NL[:, :, None])
    changes_NLH = solve(system_NLL, changes_NLH)
    scores_NLL = torch.bmm(q_NLK, keys_NKL).mul_(between_NLL)
    out_NLH = torch.bmm(q_NLK, state_NKH).mul_(kept_NL1).baddbmm_(scores_NLL, changes_NLH)
    state_NKH.mul_(kept_NL1[:, -1:]).baddbmm_(keys_NKL * between_NLL[:, None, -1], changes_NLH)
    return out_NLH
