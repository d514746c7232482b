"""Kimi's delta attention: its definition, and its kernels in plain torch.

Shape suffixes: those of `raycore.state.spec`, O elements of all heads, L tokens of a block, and 1 for a dimension that
is broadcast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from raycore.layers.rows import on_one_thread
from raycore.models.mixers.kda import KdaSpec
from raycore.state.delta import normalized, solve
from raycore.state.recurrence import MatrixRecurrence
from raycore.state.spec import StateStep
from raycore.state.torch_recurrence import TorchRecurrence
from raycore.state.torch_step import TorchStep, TorchSteps, by_token, softplus
from raycore.step.memory import FLOAT32_BYTES, StepLimits

_BLOCK = 16
"""Number of tokens whose updates of a state are computed together. There is a decay of each channel between each two of
them, so more would need much memory."""


@dataclass(slots=True, frozen=True)
class KdaLayer:
    """What a layer with Kimi's delta attention has beside its projections, and its states."""

    conv_CW: Tensor
    """The taps of each channel, the oldest first. In the model's data type."""
    decay_N: Tensor
    """float32: `A_log`."""
    bias_O: Tensor
    """float32: `dt_bias`."""
    conv_states_RCW: Tensor
    """[R, C, W - 1]: the last inputs of the convolution, the oldest first, before its activation."""
    states_RNKH: Tensor
    """float32[R, N, K, H]."""


class TorchKda:
    """Computes Kimi's delta attention.

    `batch_invariant`: make the bits of each token's result independent of the step's other sequences, and of how its
    prompt is divided into steps.
    """

    def __init__(self, own: KdaSpec, *, batch_invariant: bool = False) -> None:
        self._own = own
        self._batch_invariant = batch_invariant
        self._steps = TorchSteps(own.conv_size)
        self._compute = TorchRecurrence(_update, _update_by_chunk, batch_invariant)

    def __call__(self, layer: KdaLayer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        indexes = self._steps.of(step, x_TX)
        out_TNH = self._compute(layer.states_RNKH, indexes, self._inputs(layer, x_TX, indexes))
        return out_TNH.view(len(x_TX), self._own.num_values).to(x_TX.dtype)

    def _inputs(self, layer: KdaLayer, x_TX: Tensor, indexes: TorchStep) -> tuple[Tensor, ...]:
        """Return what the updates read: the arguments of `_update` for each token."""
        own, invariant = self._own, self._batch_invariant
        heads_TNK = len(x_TX), own.num_v_heads, own.k_dim
        x_TC, b_TN, f_TO = torch.split(x_TX, [own.num_channels, own.num_v_heads, own.num_values], 1)
        y_TC = indexes.convolve(x_TC, layer.conv_CW, None, layer.conv_states_RCW)
        y_TC = by_token(functional.silu, y_TC, batch_invariant=invariant)
        q_TNK, k_TNK, v_TNH = (each.reshape(heads_TNK) for each in y_TC.chunk(3, 1))
        q_TNK, k_TNK = (on_one_thread(normalized, x) if invariant else normalized(x) for x in (q_TNK, k_TNK))
        rates_N1 = layer.decay_N.exp()[:, None]
        f_TO = f_TO.float() + layer.bias_O
        if own.least_decay is None:
            decays_TNK = by_token(softplus, f_TO, batch_invariant=invariant).view(heads_TNK) * -rates_N1
        else:
            f_TO = (f_TO.view(heads_TNK) * rates_N1).flatten(1)
            decays_TNK = by_token(torch.sigmoid, f_TO, batch_invariant=invariant).view(heads_TNK) * own.least_decay
        return (
            q_TNK.mul_(1.0 / math.sqrt(own.k_dim)),
            k_TNK,
            v_TNH,
            by_token(torch.sigmoid, b_TN.float(), batch_invariant=invariant),
            decays_TNK,
        )


class KdaRecurrence(MatrixRecurrence):
    """Computes layers with Kimi's delta attention.

    x_TX has, for each token, the channels C of queries, keys and values, then `b`, N numbers, then `f`, N·K numbers.
    Channels go through the convolution and SiLU. Queries and keys are divided by their norms (eps 1e-6), and queries by
    sqrt(K). For each token, with a state S of [K, H] for each head, which begins as zeros,

        S ← diag(exp(-exp(decay) · softplus(f + bias))) · S
        S ← S + k ⊗ (sigmoid(b) · (v - Sᵀ k))
        output = Sᵀ q

    in float32. It is the gated delta rule with a decay of each channel of a key, instead of one of the head.
    With `KdaSpec.least_decay`, states are multiplied by exp(least_decay · sigmoid(exp(decay) · (f + bias))) instead.
    Source: Kimi Linear (https://arxiv.org/abs/2510.26692), equation 1.
    """

    layer = KdaLayer
    by_torch = TorchKda

    def step_bytes(self, limits: StepLimits, hidden_size: int, item_size: int, *, is_native: bool) -> int:
        own = self._own
        of_matrices = super().step_bytes(limits, hidden_size, item_size, is_native=is_native)
        # what decays and gates are made of, and they; decays of channels between the tokens of a block
        of_token = 3 * (own.num_values + own.k_dim) * item_size + 3 * own.num_values * FLOAT32_BYTES
        block = own.num_values * _BLOCK * (4 * _BLOCK + 6) * FLOAT32_BYTES
        return of_matrices + limits.num_tokens * of_token + block


def _update(state_NKH: Tensor, q_NK: Tensor, k_NK: Tensor, v_NH: Tensor, beta_N: Tensor, decay_NK: Tensor) -> Tensor:
    """Update the states of some heads by one token each. Returns the results [N, H].

    `beta_N`: the fractions of values that are written. `decay_NK`: the logarithms of what states are multiplied by.
    """
    state_NKH.mul_(decay_NK.exp()[:, :, None])
    change_N1H = (v_NH[:, None] - torch.bmm(k_NK[:, None], state_NKH)).mul_(beta_N[:, None, None])
    state_NKH.addcmul_(k_NK[:, :, None], change_N1H)
    return torch.bmm(q_NK[:, None], state_NKH)[:, 0]


def _update_by_chunk(state_NKH: Tensor, *inputs_NL: Tensor) -> Tensor:
    """Update the states of some heads by the tokens of a chunk, block after block. Returns the results [N, L, H]."""
    num_tokens = inputs_NL[0].shape[1]
    blocks = [slice(first, min(first + _BLOCK, num_tokens)) for first in range(0, num_tokens, _BLOCK)]
    return torch.cat([_update_by_block(state_NKH, *(each[:, block] for each in inputs_NL)) for block in blocks], 1)


def _update_by_block(
    state_NKH: Tensor, q_NLK: Tensor, k_NLK: Tensor, v_NLH: Tensor, beta_NL: Tensor, decay_NLK: Tensor
) -> Tensor:
    """Update the states of some heads by the tokens of a block. Returns the results [N, L, H].

    What a token writes depends on what the tokens before it have written: this is a triangular system of equations.
    Source: Kimi Linear (https://arxiv.org/abs/2510.26692), section 3.1.
    """
    # after a token that wipes out the state, the differences of large sums have to be precise
    sums_NLK = decay_NLK.double().cumsum(1)
    is_later_LL = torch.ones(sums_NLK.shape[1], sums_NLK.shape[1], dtype=torch.bool, device=sums_NLK.device).triu_(1)
    between_NLLK = (sums_NLK[:, :, None] - sums_NLK[:, None]).float()
    keys_NLLK = between_NLLK.masked_fill_(is_later_LL[:, :, None], -math.inf).exp_().mul_(k_NLK[:, None])
    """The keys of earlier tokens, as they have decayed until each token."""
    kept_NLK = sums_NLK.float().exp_()
    system_NLL = (keys_NLLK @ k_NLK[..., None])[..., 0].mul_(beta_NL[:, :, None])
    changes_NLH = (v_NLH - torch.bmm(k_NLK * kept_NLK, state_NKH)).mul_(beta_NL[:, :, None])
    changes_NLH = solve(system_NLL, changes_NLH)
    scores_NLL = (keys_NLLK @ q_NLK[..., None])[..., 0]
    out_NLH = torch.bmm(q_NLK * kept_NLK, state_NKH).baddbmm_(scores_NLL, changes_NLH)
    state_NKH.mul_(kept_NLK[:, -1, :, None]).baddbmm_(keys_NLLK[:, -1].transpose(1, 2), changes_NLH)
    return out_NLH
