"""The gated delta rule in plain torch.

Shape suffixes: those of `raycore.state.spec`, L tokens of a chunk, and 1 for a dimension that is broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor

from raycore.layers.rows import on_one_thread
from raycore.state.spec import DeltaLayer, DeltaShape, StateStep
from raycore.state.torch_step import Sequence, TorchStep, TorchSteps, by_token, softplus

CHUNK = 64
"""Number of tokens whose updates of a state are computed together."""
EPS = 1e-6
"""Is added to the squared norms of queries and keys."""


class TorchDelta:
    """Computes the gated delta rule.

    All sequences with one token are computed together, and others one by one, in chunks of tokens. With
    `batch_invariant`, each token is computed by itself: then its result has the same bits whatever else the step
    computes, and however its prompt is divided into steps.
    """

    def __init__(self, shape: DeltaShape, *, batch_invariant: bool = False) -> None:
        self._shape = shape
        self._batch_invariant = batch_invariant
        self._steps = TorchSteps(shape.conv_size)

    def __call__(self, layer: DeltaLayer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        shape, indexes = self._shape, self._steps.of(step, x_TX)
        inputs = self._inputs(layer, x_TX, indexes)
        out_TNH = inputs.v_TNH.new_zeros(inputs.v_TNH.shape)
        num_decodes = 0 if self._batch_invariant else step.num_decodes
        if num_decodes:
            self._decode(layer, inputs, indexes, num_decodes, out_TNH)
        for sequence in indexes.sequences[num_decodes:]:
            self._compute(layer, inputs, sequence, out_TNH)
        return out_TNH.view(len(x_TX), shape.num_v_heads * shape.v_dim).to(x_TX.dtype)

    def _inputs(self, layer: DeltaLayer, x_TX: Tensor, indexes: TorchStep) -> _Inputs:
        shape, invariant = self._shape, self._batch_invariant
        sizes = [shape.num_channels, shape.num_v_heads, shape.num_v_heads]
        x_TC, b_TN, a_TN = torch.split(x_TX, sizes, 1)
        y_TC = indexes.convolve(x_TC, layer.conv_CW, None, layer.conv_states_RCW, batch_invariant=invariant)
        key_size = shape.num_k_heads * shape.k_dim
        q_TX, k_TX, v_TX = torch.split(y_TC, [key_size, key_size, shape.num_v_heads * shape.v_dim], 1)
        times_TN = by_token(softplus, a_TN.float() + layer.bias_N, batch_invariant=invariant)
        return _Inputs(
            self._for_value_heads(q_TX).mul_(1.0 / math.sqrt(shape.k_dim)),
            self._for_value_heads(k_TX),
            v_TX.view(len(x_TX), shape.num_v_heads, shape.v_dim),
            by_token(torch.sigmoid, b_TN.float(), batch_invariant=invariant),
            times_TN * -layer.decay_N.exp(),
        )

    def _for_value_heads(self, x_TX: Tensor) -> Tensor:
        """Divide key heads by their norms, and repeat them for their value heads. Returns [T, N, K]."""
        x_TGK = x_TX.view(len(x_TX), self._shape.num_k_heads, self._shape.k_dim)
        normalized_TGK = on_one_thread(_normalized, x_TGK) if self._batch_invariant else _normalized(x_TGK)
        return normalized_TGK.repeat_interleave(self._shape.num_v_heads // self._shape.num_k_heads, 1)

    def _decode(self, layer: DeltaLayer, inputs: _Inputs, indexes: TorchStep, count: int, out_TNH: Tensor) -> None:
        """Compute the first `count` sequences, which have one token each."""
        tokens_n = indexes.tokens_n[:count]
        states_nNKH = indexes.states(layer.states_RNKH, count)
        chosen = (each.index_select(0, tokens_n).flatten(0, 1) for each in inputs.all)
        out_NH = _update(states_nNKH.flatten(0, 1), *chosen)
        layer.states_RNKH.index_copy_(0, indexes.write_rows_n[:count], states_nNKH)
        out_TNH.index_copy_(0, tokens_n, out_NH.view(count, *out_TNH.shape[1:]))

    def _compute(self, layer: DeltaLayer, inputs: _Inputs, sequence: Sequence, out_TNH: Tensor) -> None:
        """Compute a sequence."""
        state_NKH = sequence.state(layer.states_RNKH)
        for begin, end, row in sequence.stretches:
            if self._batch_invariant:
                for token in range(begin, end):
                    out_TNH[token] = _update(state_NKH, *(each[token] for each in inputs.all))
            else:
                for first in range(begin, end, CHUNK):
                    tokens = slice(first, min(first + CHUNK, end))
                    by_head = (each[tokens].transpose(0, 1) for each in inputs.all)
                    out_TNH[tokens] = _update_by_chunk(state_NKH, *by_head).transpose(0, 1)
            layer.states_RNKH[row] = state_NKH


class _Inputs:
    """What the recurrence reads, in float32, for value heads."""

    def __init__(self, q_TNK: Tensor, k_TNK: Tensor, v_TNH: Tensor, beta_TN: Tensor, decay_TN: Tensor) -> None:
        """`beta_TN`: the share of a value that is written. `decay_TN`: the logarithms of what multiplies states."""
        self.v_TNH = v_TNH
        self.all = q_TNK, k_TNK, v_TNH, beta_TN, decay_TN


_solve = cast(
    Callable[[Tensor, Tensor], Tensor],
    partial(torch.linalg.solve_triangular, upper=False, unitriangular=True),  # pyright: ignore[reportUnknownMemberType]
)
"""Solves systems of equations, of which the first argument has the coefficients below the diagonal."""


def _normalized(x_TGK: Tensor) -> Tensor:
    return x_TGK / x_TGK.square().sum(-1, keepdim=True).add_(EPS).sqrt_()


def _update(state_NKH: Tensor, q_NK: Tensor, k_NK: Tensor, v_NH: Tensor, beta_N: Tensor, decay_N: Tensor) -> Tensor:
    """Update the states of some heads by one token each. Returns the results [N, H]."""
    state_NKH.mul_(decay_N.exp()[:, None, None])
    k_N1K = k_NK[:, None]
    change_N1H = (v_NH[:, None] - torch.bmm(k_N1K, state_NKH)).mul_(beta_N[:, None, None])
    state_NKH.baddbmm_(k_N1K.transpose(1, 2), change_N1H)
    return torch.bmm(q_NK[:, None], state_NKH)[:, 0]


def _update_by_chunk(
    state_NKH: Tensor, q_NLK: Tensor, k_NLK: Tensor, v_NLH: Tensor, beta_NL: Tensor, decay_NL: Tensor
) -> Tensor:
    """Update the states of some heads by the tokens of a chunk. Returns the results [N, L, H].

    What a token writes depends on what the tokens before it have written: this is a triangular system of equations.
    Source: Gated Delta Networks (https://arxiv.org/abs/2412.06464), section 3.3.
    """
    # after a token that wipes out the state, the differences of large sums have to be precise
    sums_NL = decay_NL.double().cumsum(1)
    is_later_LL = torch.ones(sums_NL.shape[1], sums_NL.shape[1], dtype=torch.bool, device=sums_NL.device).triu_(1)
    between_NLL = (sums_NL[:, :, None] - sums_NL[:, None]).float().masked_fill_(is_later_LL, -math.inf).exp_()
    kept_NL1 = sums_NL.float().exp_()[:, :, None]
    keys_NKL = k_NLK.transpose(1, 2)
    system_NLL = torch.bmm(k_NLK, keys_NKL).mul_(between_NLL).mul_(beta_NL[:, :, None])
    changes_NLH = (v_NLH - torch.bmm(k_NLK, state_NKH).mul_(kept_NL1)).mul_(beta_NL[:, :, None])
    changes_NLH = _solve(system_NLL, changes_NLH)
    scores_NLL = torch.bmm(q_NLK, keys_NKL).mul_(between_NLL)
    out_NLH = torch.bmm(q_NLK, state_NKH).mul_(kept_NL1).baddbmm_(scores_NLL, changes_NLH)
    state_NKH.mul_(kept_NL1[:, -1:]).baddbmm_(keys_NKL * between_NLL[:, None, -1], changes_NLH)
    return out_NLH
