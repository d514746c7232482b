"""Picks tokens from logits: the most likely one, or a draw from the tokens that min-p, top-k and top-p keep.

The *weights* here are unnormalised probabilities, `exp((logit - largest logit) / temperature)`: the most likely token
has weight 1. Every filter is a threshold on the weight, and the draw goes through the tokens in the order of the
vocabulary. So a row's token depends on that row alone, not on other rows or on how a sort breaks ties. Tokens exactly
as likely as the last one that top-k or top-p keeps are kept too.

Only with `batch_invariant` is this exact to the last bit. Torch splits long tensors among threads. That changes the
rounding of `exp` for the elements before a cut within a row, and of the sum of a single long row. Everything else is
exact, or sums every row, or block of a row, in one piece and in order.

Where there are several ways to the same numbers, the choice was measured on a CPU with 64 rows of 8,192 tokens; see the
comments.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_BLOCK = 128
"""Size of blocks in two-stage searches: the block first, then the token. Sums and maxima of blocks are cheap."""
_BLOCKED_SEARCH_FROM = 1 << 16
"""With fewer logits than this, a search in two stages isn't worth it."""
_TOP_BLOCK = 32
"""Size of blocks in the search for the largest few dozen weights."""
_FIRST_TOP = 64
"""Top-p looks at this many of the most likely tokens first, and sorts the whole row only if they don't suffice."""


def most_likely(logits_RV: Tensor) -> Tensor:
    """int64[R]: the most likely token, the first of equals."""
    if logits_RV.device.type == "cpu" and logits_RV.dtype == torch.float32:
        # numpy's search is many times faster than torch's own, in the types that numpy has
        return torch.as_tensor(logits_RV.numpy().argmax(axis=-1))
    num_rows, vocab_size = logits_RV.shape
    if logits_RV.device.type != "cpu" or vocab_size % _BLOCK or logits_RV.numel() < _BLOCKED_SEARCH_FROM:
        return logits_RV.max(dim=-1).indices
    # a maximum without its index is vectorised, one with it isn't: 0.2 against 0.6 ms
    logits_RNB = logits_RV.view(num_rows, -1, _BLOCK)
    block_R = logits_RNB.amax(dim=-1).max(dim=-1).indices
    return block_R * _BLOCK + logits_RNB[torch.arange(num_rows), block_R].max(dim=-1).indices


def token_weights(logits_RV: Tensor, temperature_R: Tensor, batch_invariant: bool = False) -> Tensor:
    """Float32[R, V], new: `exp((logits - max) / temperature)`. No temperature is so small that this overflows."""
    logits_RV = logits_RV.float()
    weights_RV = logits_RV - logits_RV.amax(dim=-1, keepdim=True)
    weights_RV.div_(temperature_R.unsqueeze(1))
    for rows in _in_parts(weights_RV, batch_invariant):
        rows.exp_()
    return weights_RV


def drop_below_(weights_RV: Tensor, threshold_R: Tensor) -> None:
    """Set weights below their row's threshold (float32) to 0, in place."""
    # a comparison that gives floats is vectorised where one that gives bools, and then masks, isn't: 0.1 against 1.1 ms
    kept_RV = torch.ge(weights_RV, threshold_R.unsqueeze(1), out=torch.empty_like(weights_RV))
    weights_RV.mul_(kept_RV)


def top_k_thresholds(weights_RV: Tensor, top_k_R: Tensor, top_p_R: Tensor) -> Tensor:
    """Float32[R]: the smallest weight among the `top_k` largest, or among those of them that first reach `top_p`.

    `top_k_R` is int64, in [1, V]; `top_p_R` is float64, a share of the sum of the `top_k` largest.
    """
    largest_RK = _largest(weights_RV, int(top_k_R.max()))
    sums_RK = largest_RK.cumsum(dim=-1, dtype=torch.float64)
    last_R1 = top_k_R.unsqueeze(1) - 1
    wanted_R1 = sums_RK.gather(1, last_R1) * top_p_R.unsqueeze(1)
    last_R1 = torch.minimum(last_R1, (sums_RK < wanted_R1).sum(dim=-1, keepdim=True))
    return largest_RK.gather(1, last_R1).squeeze(1)


def top_p_thresholds(weights_RV: Tensor, top_p_R: Tensor, batch_invariant: bool = False) -> Tensor:
    """Float32[R]: the smallest weight among the fewest that together reach `top_p_R` (float64) of the total."""
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


def draw(weights_RV: Tensor, uniform_R: Tensor) -> Tensor:
    """int64[R]: the token at which the running sum of weights reaches `1 - uniform_R` of the total.

    `uniform_R` is float64, in [0, 1). So the target is positive, and no token of weight 0 is drawn.
    """
    return _search(weights_RV, 1.0 - uniform_R)


def _in_parts(x_RV: Tensor, batch_invariant: bool) -> list[Tensor]:
    return [x_RV[row : row + 1] for row in range(len(x_RV))] if batch_invariant else [x_RV]


def _search(weights_RV: Tensor, share_R: Tensor) -> Tensor:
    """int64[R]: the index at which the running sum of weights first reaches this share (float64, in (0, 1]) of the
    total."""
    num_rows, vocab_size = weights_RV.shape
    if vocab_size % _BLOCK:
        weights_RV = torch.nn.functional.pad(weights_RV, (0, -vocab_size % _BLOCK))
    weights_RNB = weights_RV.view(num_rows, -1, _BLOCK)
    sums_RN = weights_RNB.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    target_R = share_R * sums_RN[:, -1]
    block_R = _first_to_reach(target_R, sums_RN)
    rows_R = torch.arange(num_rows, device=weights_RV.device)
    before_R = torch.where(block_R > 0, sums_RN[rows_R, block_R - 1], 0.0)
    sums_RB = weights_RNB[rows_R, block_R].cumsum(dim=-1, dtype=torch.float64)
    return block_R * _BLOCK + _first_to_reach(target_R - before_R, sums_RB)


def _first_to_reach(target_R: Tensor, sums_RN: Tensor) -> Tensor:
    """The index at which each row's running sums first reach the target, or their own maximum if rounding left it
    lower."""
    return (sums_RN < torch.minimum(target_R, sums_RN[:, -1]).unsqueeze(1)).sum(dim=-1)


def _largest(weights_RV: Tensor, width: int) -> Tensor:
    """Float32[R, width]: each row's largest weights, in descending order."""
    num_rows, vocab_size = weights_RV.shape
    num_blocks = vocab_size // _TOP_BLOCK
    if vocab_size % _TOP_BLOCK == 0 and num_blocks >= 2 * width:
        # the n largest lie in the n blocks with the largest maxima: 1.1 against 2.2 ms for topk alone
        weights_RNB = weights_RV.view(num_rows, num_blocks, _TOP_BLOCK)
        blocks_RK = weights_RNB.amax(dim=-1).topk(width, dim=-1, sorted=False).indices
        rows_R1 = torch.arange(num_rows, device=weights_RV.device).unsqueeze(1)
        weights_RV = weights_RNB[rows_R1, blocks_RK].view(num_rows, -1)
    if weights_RV.device.type == "cpu":
        # numpy sorts numbers alone with SIMD, torch carries their indices along: 2.5 against 39 ms for whole rows
        sorted_RV = np.sort(weights_RV.numpy(), axis=-1)
        return torch.as_tensor(sorted_RV[:, sorted_RV.shape[1] - width :]).flip(-1)
    return weights_RV.sort(dim=-1, descending=True).values[:, :width]
