"""Picks tokens from logits: the most likely one, or a draw from the tokens that min-p, top-k and top-p keep.

In this module, *weights* are unnormalized probabilities, `exp((logit - largest logit) / temperature)`: the most likely
token has weight 1. Every filter is a threshold on the weight, and the draw goes through the tokens in the order of the
vocabulary. So a row's token depends on that row alone, not on other rows or on how a sort breaks ties. Tokens exactly
as likely as the last one that top-k or top-p keeps are kept too.

Only with `batch_invariant` is a row's token independent of other rows to the last bit. Otherwise, torch splits long
tensors among threads, which changes two roundings: that of `exp` for elements before a cut within a row, and that of
the sum of a single long row. All other operations are exact, or sum every row, or block of a row, in one piece and in
order.

Where there are several ways to compute the same numbers, the fastest one was chosen. Times in comments were measured on
a CPU, with 64 rows of 8,192 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.step.copies import to_device

_BLOCK = 128
"""Number of tokens in a block. A search first finds the block, from its sum or maximum, then the token in it."""
_BLOCKED_SEARCH_FROM = 1 << 16
"""With fewer logits than this, a search in two stages isn't worth it."""
_TOP_BLOCK = 32
"""Number of tokens in a block, in the search for the largest few dozen weights."""
_FIRST_TOP = 64
"""Top-p looks at this many of the most likely tokens first, and sorts the whole row only if they don't suffice."""


class DrawLimits(NamedTuple):
    """What the draws of R rows are limited to.

    Native and Triton kernels read the fields, in this order, as the columns of a matrix. The same columns are named
    in `raycore/kernels/csrc/kernels.h` and in `raycore/kernels/gpu/sampling.py`.
    """

    temperature_R: NDArray[np.float32]
    min_p_R: NDArray[np.float32]
    """The least weight."""
    top_k_R: NDArray[np.int64]
    """In [1, V]."""
    top_p_R: NDArray[np.float64]
    uniform_R: NDArray[np.float64]
    """Random numbers in [0, 1)."""

    def matrix(self) -> NDArray[np.float64]:
        """Return float64[R, L]: each row's limits, with a column for each of the L fields."""
        return np.stack(self, axis=1, dtype=np.float64)


def most_likely(logits_RV: Tensor) -> Tensor:
    """Return int64[R]: each row's most likely token. If several are equally likely, the first of them."""
    if logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32:
        # numpy's search is many times faster than torch's own, in the types that numpy has
        return torch.as_tensor(logits_RV.numpy().argmax(axis=-1))
    num_rows, vocab_size = logits_RV.shape
    if logits_RV.device.type != "cpu" or vocab_size % _BLOCK or logits_RV.numel() < _BLOCKED_SEARCH_FROM:
        return logits_RV.max(dim=-1).indices
    # torch vectorizes a maximum without its index, but not one with it: 0.2 ms instead of 0.6 ms
    logits_RNB = logits_RV.view(num_rows, -1, _BLOCK)
    block_R = logits_RNB.amax(dim=-1).max(dim=-1).indices
    return block_R * _BLOCK + logits_RNB[torch.arange(num_rows), block_R].max(dim=-1).indices


def token_weights(logits_RV: Tensor, temperature_R: Tensor, batch_invariant: bool = False) -> Tensor:
    """Return a new float32[R, V]: `exp((logits - max) / temperature)`. No temperature makes this overflow."""
    logits_RV = logits_RV.float()
    weights_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    weights_RV.div_(temperature_R.unsqueeze(1))
    for rows in _in_parts(weights_RV, batch_invariant):
        rows.exp_()
    return weights_RV


def drop_below_(weights_RV: Tensor, threshold_R: Tensor) -> None:
    """Set the weights that are below their row's threshold (float32) to 0, in place."""
    # torch vectorizes a comparison that gives floats, but not a mask of bools: 0.1 ms instead of 1.1 ms
    kept_RV = torch.ge(weights_RV, threshold_R.unsqueeze(1), out=torch.empty_like(weights_RV))
    weights_RV.mul_(kept_RV)


def top_k_thresholds(weights_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Return float32[R]: each row's smallest weight that top-k and then top-p keep.

    `top_k_R` is int64, in [1, V]: how many of the largest weights top-k keeps. `top_p_R` is float64: of these, top-p
    keeps the largest, as few as are needed to reach this fraction of their sum.
    """
    largest_RK = _largest(weights_RV, int(top_k_R.max()))
    sums_RK = largest_RK.cumsum(dim=-1, dtype=torch.float64)
    last_R1 = top_k_R.unsqueeze(1) - 1
    wanted_R1 = sums_RK.gather(1, last_R1) * top_p_R.unsqueeze(1)
    last_R1 = torch.minimum(last_R1, (sums_RK < wanted_R1).sum(dim=-1, keepdim=True))
    return largest_RK.gather(1, last_R1).squeeze(1)


def top_p_thresholds(weights_RV: Tensor, top_p_R: Tensor, batch_invariant: bool = False) -> Tensor:
    """Return float32[R]: each row's smallest weight that top-p keeps.

    Top-p keeps the largest weights, as few as are needed to reach the fraction `top_p_R` (float64) of the row's sum.
    """
    vocab_size = weights_RV.shape[1]
    totals = [rows.sum(dim=-1, dtype=torch.float64) for rows in _in_parts(weights_RV, batch_invariant)]
    wanted_R = torch.cat(totals) * top_p_R
    largest_RK = _largest(weights_RV, min(_FIRST_TOP, vocab_size))
    sums_RK = largest_RK.cumsum(dim=-1, dtype=torch.float64)
    last_R = _first_to_reach(wanted_R, sums_RK)
    threshold_R = largest_RK.gather(1, last_R.unsqueeze(1)).squeeze(1)
    unreached_P = torch.nonzero(sums_RK[:, -1] < wanted_R).squeeze(1)
    if len(unreached_P) and vocab_size > _FIRST_TOP:
        sorted_PV = _largest(weights_RV[unreached_P], vocab_size)
        last_P = _search(sorted_PV, top_p_R[unreached_P])
        threshold_R[unreached_P] = sorted_PV.gather(1, last_P.unsqueeze(1)).squeeze(1)
    return threshold_R


def draw(logits_RV: Tensor, limits: DrawLimits, batch_invariant: bool = False) -> Tensor:
    """Return int64[R]: the token that each row draws."""
    weights_RV = token_weights(logits_RV, to_device(limits.temperature_R, logits_RV.device), batch_invariant)
    _drop_unlikely_(weights_RV, limits, batch_invariant)
    return draw_weighted(weights_RV, to_device(limits.uniform_R, logits_RV.device))


def drawn_logits(logits_RV: Tensor, limits: DrawLimits, batch_invariant: bool = False) -> Tensor:
    """Return a new float32[R, V]: the logits divided by the temperatures, and minus infinity for tokens that can't be
    drawn."""
    temperature_R = to_device(limits.temperature_R, logits_RV.device)
    weights_RV = token_weights(logits_RV, temperature_R, batch_invariant)
    least_R = _drop_unlikely_(weights_RV.clone(), limits, batch_invariant)
    scaled_RV = logits_RV.float() / temperature_R.unsqueeze(1)
    return scaled_RV.masked_fill_(weights_RV < least_R.unsqueeze(1), -torch.inf)


def _drop_unlikely_(weights_RV: Tensor, limits: DrawLimits, batch_invariant: bool) -> Tensor:
    """Set the weights of tokens that min-p, top-k and top-p don't keep to 0, in place.

    Returns: float32[R]: each row's threshold. Weights that are less are 0 now.
    """
    vocab_size, device = weights_RV.shape[1], weights_RV.device
    least_R = torch.zeros_like(weights_RV[:, 0])
    if limits.min_p_R.any():
        least_R = to_device(limits.min_p_R, device)
        drop_below_(weights_RV, least_R)
    has_top_k = limits.top_k_R < vocab_size
    rows_K = to_device(np.flatnonzero(has_top_k), device)
    rows_P = to_device(np.flatnonzero((limits.top_p_R < 1.0) & ~has_top_k), device)
    if len(rows_K) or len(rows_P):
        top_k_R, top_p_R = to_device(limits.top_k_R, device), to_device(limits.top_p_R, device)
        threshold_R = torch.zeros_like(weights_RV[:, 0])
        if len(rows_K):
            threshold_R[rows_K] = top_k_thresholds(weights_RV[rows_K], top_k_R[rows_K], top_p_R[rows_K])
        if len(rows_P):
            threshold_R[rows_P] = top_p_thresholds(weights_RV[rows_P], top_p_R[rows_P], batch_invariant)
        drop_below_(weights_RV, threshold_R)
        least_R = torch.maximum(least_R, threshold_R)
    return least_R


def draw_weighted(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """Return int64[R]: each row's first token at which the running sum reaches the fraction `1 - uniform_R` of its sum.

    `uniform_R` is float64, in [0, 1). So the fraction is positive, and no token of weight 0 is drawn.
    """
    return _search(weights_RV, 1.0 - uniform_R)


def _in_parts(x_RV: Tensor, batch_invariant: bool) -> list[Tensor]:
    return [x_RV[row : row + 1] for row in range(len(x_RV))] if batch_invariant else [x_RV]


def _search(weights_RV: Tensor, fraction_R: Tensor) -> Tensor:
    """Return int64[R]: in each row, the first index at which the running sum of weights reaches a fraction of the row's
    sum.

    `fraction_R` is float64, in (0, 1].
    """
    num_rows, vocab_size = weights_RV.shape
    if vocab_size % _BLOCK:
        weights_RV = torch.nn.functional.pad(weights_RV, (0, -vocab_size % _BLOCK))
    weights_RNB = weights_RV.view(num_rows, -1, _BLOCK)
    sums_RN = weights_RNB.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target_R = fraction_R * sums_RN[:, -1]
    block_R = _first_to_reach(target_R, sums_RN)
    rows_R = torch.arange(num_rows, device=weights_RV.device)
    before_R = torch.where(block_R > 0, sums_RN[rows_R, block_R - 1], 0.0)
    sums_RB = weights_RNB[rows_R, block_R].cumsum(dim=-1, dtype=torch.float64)
    return block_R * _BLOCK + _first_to_reach(target_R - before_R, sums_RB)


def _first_to_reach(target_R: Tensor, sums_RN: Tensor) -> Tensor:
    """Return the first index in each row at which the running sum reaches the row's target.

    If rounding left all sums below the target, return the first index of the largest sum.
    """
    return (sums_RN < torch.minimum(target_R, sums_RN[:, -1]).unsqueeze(1)).sum(dim=-1)


def _largest(weights_RV: Tensor, width: int) -> Tensor:
    """Return float32[R, width]: each row's largest weights, in descending order."""
    num_rows, vocab_size = weights_RV.shape
    num_blocks = vocab_size // _TOP_BLOCK
    if vocab_size % _TOP_BLOCK == 0 and num_blocks >= 2 * width:
        # the n largest weights are in the n blocks with the largest maxima: 1.1 ms instead of 2.2 ms for topk alone
        weights_RNB = weights_RV.view(num_rows, num_blocks, _TOP_BLOCK)
        blocks_RK = weights_RNB.amax(dim=-1).topk(width, dim=-1, sorted=False).indices
        rows_R1 = torch.arange(num_rows, device=weights_RV.device).unsqueeze(1)
        weights_RV = weights_RNB[rows_R1, blocks_RK].view(num_rows, -1)
    if weights_RV.device.type == "cpu":
        # numpy sorts only numbers, with SIMD; torch also sorts their indexes: 2.5 ms instead of 39 ms for whole rows
        sorted_RV = np.sort(weights_RV.numpy(), axis=-1)
        return torch.as_tensor(sorted_RV[:, sorted_RV.shape[1] - width :]).flip(-1)
    return weights_RV.sort(dim=-1, descending=True).values[:, :width]
