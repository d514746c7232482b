"""Recurrences of states in plain torch: the part that all kinds of layers have in common.

Shape suffixes: those of `raycore.state.spec`, and L tokens of a chunk. Of inputs, * is the rest of the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from raycore.state.torch_step import Sequence, TorchStep

CHUNK = 64
"""Number of tokens whose updates of a state are computed together."""
DECODE_NUMBERS = 1 << 20
"""About how many numbers of states are updated together, so that they stay in a CPU's caches."""


@dataclass(slots=True, frozen=True)
class TorchRecurrence:
    """Computes the tokens of a step, given what one token, or a chunk of them, does to the states of some heads.

    Sequences with one token are computed together, as many as fit in caches, and others one by one, in chunks of
    tokens. With `batch_invariant`, each token is computed by itself: then its result has the same bits whatever else
    the step computes, and however its prompt is divided into steps.
    """

    update: Callable[..., Tensor]
    """Gets the states [N, K, H] of some heads, which it updates, and inputs [N, *]. Returns the results [N, H]."""
    update_by_chunk: Callable[..., Tensor]
    """Gets the same, but inputs [N, L, *]. Returns the results [N, L, H]."""
    batch_invariant: bool

    def __call__(self, states_RNKH: Tensor, indexes: TorchStep, inputs_TN: tuple[Tensor, ...]) -> Tensor:
        """Return the results, float32[T, N, H], and write the states. `inputs_TN`: each is float32[T, N, *]."""
        num_tokens, (_, num_heads, _, dim) = len(inputs_TN[0]), states_RNKH.shape
        out_TNH = torch.zeros(num_tokens, num_heads, dim, device=states_RNKH.device)
        num_decodes = 0 if self.batch_invariant else indexes.step.num_decodes
        size = max(1, DECODE_NUMBERS // max(1, math.prod(states_RNKH.shape[1:])))
        for first in range(0, num_decodes, size):
            decodes = slice(first, min(first + size, num_decodes))
            self._decode(states_RNKH, indexes, inputs_TN, decodes, out_TNH)
        for sequence in indexes.sequences[num_decodes:]:
            self._compute(states_RNKH, sequence, inputs_TN, out_TNH)
        return out_TNH

    def _decode(
        self, states_RNKH: Tensor, indexes: TorchStep, inputs_TN: tuple[Tensor, ...], decodes: slice, out_TNH: Tensor
    ) -> None:
        """Compute some sequences that have one token each."""
        tokens_n = indexes.tokens_n[decodes]
        states_nNKH = indexes.states(states_RNKH, decodes)
        chosen = (each.index_select(0, tokens_n).flatten(0, 1) for each in inputs_TN)
        out_NH = self.update(states_nNKH.flatten(0, 1), *chosen)
        states_RNKH.index_copy_(0, indexes.write_rows_n[decodes], states_nNKH)
        out_TNH.index_copy_(0, tokens_n, out_NH.view(-1, *out_TNH.shape[1:]))

    def _compute(self, states_RNKH: Tensor, sequence: Sequence, inputs_TN: tuple[Tensor, ...], out_TNH: Tensor) -> None:
        state_NKH = sequence.state(states_RNKH)
        for begin, end, row in sequence.stretches:
            if self.batch_invariant:
                for token in range(begin, end):
                    out_TNH[token] = self.update(state_NKH, *(each[token] for each in inputs_TN))
            else:
                for first in range(begin, end, CHUNK):
                    tokens = slice(first, min(first + CHUNK, end))
                    by_head = (each[tokens].transpose(0, 1) for each in inputs_TN)
                    out_TNH[tokens] = self.update_by_chunk(state_NKH, *by_head).transpose(0, 1)
            states_RNKH[row] = state_NKH


def decays(logarithms_NL: Tensor) -> tuple[Tensor, Tensor]:
    """Return what states are multiplied by in a chunk, in float32.

    Args:
        logarithms_NL: of each token's decay.

    Returns: from before the chunk to each token, its own decay included, [N, L, 1]; and from each token of the last
        dimension to each of the second, [N, L, L], zero for later ones.
    """
    # after a token that wipes out the state, the differences of large sums have to be precise
    sums_NL = logarithms_NL.double().cumsum(1)
    is_later_LL = torch.ones(sums_NL.shape[1], sums_NL.shape[1], dtype=torch.bool, device=sums_NL.device).triu_(1)
    between_NLL = (sums_NL[:, :, None] - sums_NL[:, None]).float().masked_fill_(is_later_LL, -math.inf).exp_()
    return sums_NL.float().exp_()[:, :, None], between_NLL


def add_products(state_NKH: Tensor, q_NK: Tensor, k_NK: Tensor, v_NH: Tensor, decay_N: Tensor) -> Tensor:
    """Add the product of key and value to the states of some heads, by one token each. Returns the results [N, H].

    `decay_N`: the logarithms of what states are multiplied by before.
    """
    state_NKH.mul_(decay_N.exp()[:, None, None]).addcmul_(k_NK[:, :, None], v_NH[:, None])
    return torch.bmm(q_NK[:, None], state_NKH)[:, 0]


def add_products_by_chunk(state_NKH: Tensor, q_NLK: Tensor, k_NLK: Tensor, v_NLH: Tensor, decay_NL: Tensor) -> Tensor:
    """The same as `add_products`, by the tokens of a chunk. Returns the results [N, L, H]."""
    kept_NL1, between_NLL = decays(decay_NL)
    keys_NKL = k_NLK.transpose(1, 2)
    scores_NLL = torch.bmm(q_NLK, keys_NKL).mul_(between_NLL)
    out_NLH = torch.bmm(q_NLK, state_NKH).mul_(kept_NL1).baddbmm_(scores_NLL, v_NLH)
    state_NKH.mul_(kept_NL1[:, -1:]).baddbmm_(keys_NKL * between_NLL[:, None, -1], v_NLH)
    return out_NLH
