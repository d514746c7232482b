"""Picks tokens from logits in Triton: the most likely one, or a draw; and computes the random numbers of draws.

A draw computes what `raycore.sampling.picking.draw` defines. A token's *weight* is
`exp((logit - largest logit) / temperature)`, and every filter keeps the weights from a threshold on. Nothing is sorted:
bits of positive numbers are ordered as the numbers are, so a threshold's 30 bits are found three at a time, from the
highest on, by adding up the weights above each of eight candidates.

Sums of weights are integers, multiples of 2^-42. They are the same in whatever order they are added up, so a row's
token doesn't depend on how rows are cut into pieces or on other rows. Smaller weights count as 0, and a sum is too low
by less than 2^-42 for each token.

A draw takes seven launches, whatever the limits are. Rows are cut into pieces of 4,096 logits, so a single row gives
work to many processors. The logits are read twice. Those of rows with top-k or top-p are read two more times, to
collect candidates and to add up what is kept. In between, one program per row goes over its candidates ten times for
top-k, and ten times for top-p. They are few if the row's largest weights are much larger than the others. At worst, for
example if all logits are equal, they are the whole row.

Shape suffixes: R rows, L limits of a row, V vocabulary, P pieces of a row, C tokens of a piece, B blocks of 64 tokens.
"""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from raycore.kernels.gpu.bound_kernel import bound

_PIECE = 4096
_BLOCK = 64
_TILE = tl.constexpr(2048)
"""Number of weights that a search for a threshold compares at a time."""
_ONE = tl.constexpr(1 << 42)
"""A weight of 1 in sums. 2^20 of them fit in 62 bits."""
_MAX_VOCAB_SIZE = 1 << 20
_NO_LIMITS = tl.constexpr(-1)
"""The bound of rows without top-k and top-p."""

LIMITS = ("temperature", "min_p", "top_k", "top_p", "uniform")
"""The columns of a draw's limits: the fields of `raycore.sampling.picking.DrawLimits`, in their order."""
_TEMPERATURE, _MIN_P, _TOP_K, _TOP_P, _UNIFORM = map(tl.constexpr, range(len(LIMITS)))
_NUM_COLUMNS = tl.constexpr(len(LIMITS))

_MULTIPLIER_1, _MULTIPLIER_2 = tl.constexpr(0xBF58476D1CE4E5B9), tl.constexpr(0x94D049BB133111EB)
_UNIT = tl.constexpr(2.0**-53)
_ROWS = 256
"""Number of rows whose random numbers one program computes."""


def mask(logits_RV: Tensor, rows_M: Tensor, masks_MB: Tensor) -> None:
    """Set the logits of tokens that may not come to minus infinity, in place. All other bits stay as they are.

    Args:
        logits_RV: float32, with contiguous rows.
        rows_M: int64: the row that each mask is for. No two are for the same row.
        masks_MB: uint8, contiguous: a bit for each token, 1 if it may come; the lowest of a byte first.
    """
    assert logits_RV.dtype == torch.float32, "logits are in float32"
    assert logits_RV.stride(1) == 1 or logits_RV.shape[1] == 1, "rows must be contiguous"
    num_masks, vocab_size = len(rows_M), logits_RV.shape[1]
    if num_masks:
        kernel = bound(_mask, B=masks_MB.shape[1], V=vocab_size, PIECE=_PIECE, num_warps=8)
        grid = num_masks, triton.cdiv(vocab_size, _PIECE), 1
        kernel(grid, logits_RV, logits_RV.stride(0), rows_M, masks_MB)


def most_likely(logits_RV: Tensor) -> Tensor:
    """Return int64[R]: each row's most likely token. If several are equally likely, the first of them.

    NaN counts as minus infinity.
    """
    out_R = torch.empty(len(logits_RV), dtype=torch.int64, device=logits_RV.device)
    if len(out_R):
        highest_RP, token_ids_RP = _find_highest(logits_RV)
        num_pieces = highest_RP.shape[1]
        kernel = bound(_pick_highest, P=num_pieces, PADDED_P=triton.next_power_of_2(num_pieces))
        kernel((len(out_R), 1, 1), highest_RP, token_ids_RP, out_R)
    return out_R


def draw(logits_RV: Tensor, limits_RL: Tensor) -> Tensor:
    """Return int64[R]: the token that each row draws.

    Args:
        limits_RL: contiguous, in float64, with the columns `LIMITS`. A temperature must be positive, and top-k in
            [1, V]. A min-p of 0, a top-k of V, and a top-p of 1 are no limits. `uniform` is a random number in [0, 1).
    """
    (num_rows, vocab_size), device = logits_RV.shape, logits_RV.device
    assert limits_RL.shape == (num_rows, len(LIMITS)), f"each row's limits are {', '.join(LIMITS)}"
    assert limits_RL.dtype == torch.float64, "limits are in float64"
    assert limits_RL.is_contiguous(), "limits are contiguous"
    assert vocab_size <= _MAX_VOCAB_SIZE, "sums of more weights may overflow"
    out_R = torch.empty(num_rows, dtype=torch.int64, device=device)
    if not num_rows:
        return out_R
    highest_RP, _ = _find_highest(logits_RV)
    num_pieces = highest_RP.shape[1]
    num_blocks = num_pieces * (_PIECE // _BLOCK)
    sums_RP = torch.empty((num_rows, num_pieces), dtype=torch.int64, device=device)
    largest_RB = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=device)
    candidates_RV = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
    bounds_R, counts_R, thresholds_R = torch.empty((3, num_rows), dtype=torch.int32, device=device)

    row = logits_RV, limits_RL, highest_RP, logits_RV.stride(0)
    sizes = {"V": vocab_size, "P": num_pieces, "PADDED_P": triton.next_power_of_2(num_pieces), "PIECE": _PIECE}
    pieces, rows = (num_rows, num_pieces, 1), (num_rows, 1, 1)
    bound(_weigh, **sizes, BLOCK=_BLOCK, num_warps=8)(pieces, *row, sums_RP, largest_RB)
    kernel = bound(_bound, **sizes, B=num_blocks, num_warps=16)
    kernel(rows, limits_RL, sums_RP, largest_RB, bounds_R, counts_R)
    bound(_collect, **sizes, num_warps=8)(pieces, *row, bounds_R, counts_R, candidates_RV)
    kernel = bound(_find_thresholds, **sizes, num_warps=16)
    kernel(rows, limits_RL, sums_RP, bounds_R, counts_R, candidates_RV, thresholds_R)
    bound(_sum_kept, **sizes, num_warps=8)(pieces, *row, thresholds_R, sums_RP)
    bound(_pick, **sizes, num_warps=8)(rows, *row, thresholds_R, sums_RP, out_R)
    return out_R


def keyed_uniform(state_R: Tensor, gamma_R: Tensor, positions_R: Tensor) -> Tensor:
    """Return float64[R] in [0, 1): for each i, number `positions_R[i]` of the stream `(state_R[i], gamma_R[i])`.

    The numbers are those of `raycore.sampling.keyed_random.uniform`. All arguments are contiguous; `state_R` and
    `gamma_R` are int64 with the bits of the unsigned integers, `positions_R` is int64 or int32.
    """
    out_R = torch.empty(len(state_R), dtype=torch.float64, device=state_R.device)
    if len(out_R):
        grid = triton.cdiv(len(out_R), _ROWS), 1, 1
        bound(_keyed_uniform, ROWS=_ROWS)(grid, state_R, gamma_R, positions_R, out_R, len(out_R))
    return out_R


def _find_highest(logits_RV: Tensor) -> tuple[Tensor, Tensor]:
    """Return each piece's highest logit, float32[R, P], and the first token that has it, int64[R, P]."""
    (num_rows, vocab_size), device = logits_RV.shape, logits_RV.device
    assert logits_RV.stride(1) == 1 or vocab_size == 1, "rows must be contiguous"
    num_pieces = triton.cdiv(vocab_size, _PIECE)
    highest_RP = torch.empty((num_rows, num_pieces), dtype=torch.float32, device=device)
    token_ids_RP = torch.empty((num_rows, num_pieces), dtype=torch.int64, device=device)
    kernel = bound(_find_highest_of_pieces, V=vocab_size, P=num_pieces, PIECE=_PIECE, num_warps=8)
    kernel((num_rows, num_pieces, 1), logits_RV, logits_RV.stride(0), highest_RP, token_ids_RP)
    return highest_RP, token_ids_RP


@triton.jit
def _logits(logits_ptr, stride, row, token_C, V: tl.constexpr):
    """Return float32[C]: a row's logits for some tokens. Minus infinity for NaN and behind the vocabulary."""
    logit_C = tl.load(logits_ptr + row * stride + token_C, mask=token_C < V, other=float("-inf")).to(tl.float32)
    return tl.where(logit_C == logit_C, logit_C, float("-inf"))


@triton.jit
def _mask(logits_ptr, stride, rows_ptr, masks_ptr, B: tl.constexpr, V: tl.constexpr, PIECE: tl.constexpr):
    index, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + index)
    token_C = piece * PIECE + tl.arange(0, PIECE)
    bits_C = tl.load(masks_ptr + index * B + (token_C >> 3), mask=token_C < V, other=255).to(tl.int32)
    is_forbidden_C = ((bits_C >> (token_C & 7)) & 1) == 0
    forbidden_C = tl.full((PIECE,), float("-inf"), tl.float32)
    tl.store(logits_ptr + row * stride + token_C, forbidden_C, mask=is_forbidden_C & (token_C < V))


@triton.jit
def _limit(limits_ptr, row, COLUMN: tl.constexpr):
    return tl.load(limits_ptr + row * _NUM_COLUMNS + COLUMN)


@triton.jit
def _weights(
    logits_ptr, limits_ptr, highest_ptr, stride, row, token_C, V: tl.constexpr, P: tl.constexpr, PADDED_P: tl.constexpr
):
    """Return float32[C]: the weights of some tokens. 0 for those below min-p and behind the vocabulary.

    The numbers have the same bits in all kernels, because no addition follows a product.
    """
    temperature = _limit(limits_ptr, row, _TEMPERATURE).to(tl.float32)
    min_p = _limit(limits_ptr, row, _MIN_P).to(tl.float32)
    piece_P = tl.arange(0, PADDED_P)
    highest = tl.max(tl.load(highest_ptr + row * P + piece_P, mask=piece_P < P, other=float("-inf")), axis=0)
    logit_C = _logits(logits_ptr, stride, row, token_C, V)
    weight_C = tl.exp(tl.div_rn(logit_C - highest, temperature))
    weight_C = tl.where(logit_C == highest, 1.0, weight_C)  # the difference of infinities isn't 0
    return tl.where((token_C < V) & (weight_C >= min_p), weight_C, 0.0)


@triton.jit
def _in_sums(weight):
    return (weight * _ONE).to(tl.int64)


@triton.jit
def _sum_of_pieces(sums_ptr, row, P: tl.constexpr, PADDED_P: tl.constexpr):
    piece_P = tl.arange(0, PADDED_P)
    return tl.sum(tl.load(sums_ptr + row * P + piece_P, mask=piece_P < P, other=0), axis=0)


@triton.jit
def _least_sum(fraction, total):
    """Return the least sum that is a fraction (float64) of a total. At least 1, unless the total is 0."""
    wanted = fraction * total.to(tl.float64)
    least = wanted.to(tl.int64)
    least += (least.to(tl.float64) < wanted).to(tl.int64)
    return tl.minimum(tl.maximum(least, 1), total)


@triton.jit
def _least_kept(weights_ptr, count, wanted, IN_NUMBER: tl.constexpr):
    """Return the bits of the largest weight such that it and all larger ones reach `wanted`, in number or in sum.

    0 if all weights don't reach it.
    """
    step_8 = tl.arange(0, 8)
    found = tl.full((), 0, tl.int32)
    for digit in range(10):
        shift = 27 - 3 * digit
        least_8 = found + (step_8 << shift)
        reached_8 = tl.full((8,), 0, tl.int64)
        for start in range(0, count, _TILE):
            index = start + tl.arange(0, _TILE)
            weight = tl.load(weights_ptr + index, mask=index < count, other=0.0)
            size = tl.full((_TILE,), 1, tl.int64) if IN_NUMBER else _in_sums(weight)
            is_kept = weight.to(tl.int32, bitcast=True)[None, :] >= least_8[:, None]
            reached_8 += tl.sum(tl.where(is_kept, size[None, :], 0), axis=1)
        found += tl.max(tl.where(reached_8 >= wanted, step_8, 0), axis=0) << shift
    return found


@triton.jit
def _find_highest_of_pieces(
    logits_ptr, stride, highest_ptr, token_ids_ptr, V: tl.constexpr, P: tl.constexpr, PIECE: tl.constexpr
):
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_C = piece * PIECE + tl.arange(0, PIECE)
    logit_C = _logits(logits_ptr, stride, row, token_C, V)
    highest = tl.max(logit_C, axis=0)
    tl.store(highest_ptr + row * P + piece, highest)
    tl.store(token_ids_ptr + row * P + piece, tl.min(tl.where(logit_C == highest, token_C, V), axis=0).to(tl.int64))


@triton.jit
def _pick_highest(highest_ptr, token_ids_ptr, out_ptr, P: tl.constexpr, PADDED_P: tl.constexpr):
    row, piece_P = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED_P)
    highest_P = tl.load(highest_ptr + row * P + piece_P, mask=piece_P < P, other=float("-inf"))
    first = tl.min(tl.where(highest_P == tl.max(highest_P, axis=0), piece_P, P), axis=0)
    tl.store(out_ptr + row, tl.load(token_ids_ptr + row * P + first))


@triton.jit
def _weigh(
    logits_ptr,
    limits_ptr,
    highest_ptr,
    stride,
    sums_ptr,
    largest_ptr,
    V: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute a piece's sum of weights, and the largest weight of each of its blocks."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token_C = piece * PIECE + tl.arange(0, PIECE)
    weight_C = _weights(logits_ptr, limits_ptr, highest_ptr, stride, row, token_C, V, P, PADDED_P)
    tl.store(sums_ptr + row * P + piece, tl.sum(_in_sums(weight_C), axis=0))
    blocks_per_piece: tl.constexpr = PIECE // BLOCK
    block_B = (row * P + piece) * blocks_per_piece + tl.arange(0, blocks_per_piece)
    tl.store(largest_ptr + block_B, tl.max(tl.reshape(weight_C, (blocks_per_piece, BLOCK)), axis=1))


@triton.jit
def _bound(
    limits_ptr,
    sums_ptr,
    largest_ptr,
    bounds_ptr,
    counts_ptr,
    V: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    PIECE: tl.constexpr,
    B: tl.constexpr,
):
    """Find a weight that the threshold of top-k and top-p isn't below. Weights from it on are the row's candidates."""
    row = tl.program_id(0).to(tl.int64)
    top_k = _limit(limits_ptr, row, _TOP_K).to(tl.int64)
    top_p = _limit(limits_ptr, row, _TOP_P)
    bound = tl.full((), _NO_LIMITS, tl.int32)
    if top_k < V:
        # k blocks' largest weights are at least as large as the k-th of them
        bound = _least_kept(largest_ptr + row * B, B, top_k, True)
    elif top_p < 1.0:
        # even if all tokens had this weight, top-p could do without them. A little less, because sums are rounded
        spare = 0.99 * (1.0 - top_p) * _sum_of_pieces(sums_ptr, row, P, PADDED_P).to(tl.float64)
        bound = tl.maximum(spare / V / _ONE, 0.0).to(tl.float32).to(tl.int32, bitcast=True)
    tl.store(bounds_ptr + row, bound)
    tl.store(counts_ptr + row, 0)


@triton.jit
def _collect(
    logits_ptr,
    limits_ptr,
    highest_ptr,
    stride,
    bounds_ptr,
    counts_ptr,
    candidates_ptr,
    V: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Add a piece's candidates to the row's. Pieces may be in any order."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    bound = tl.load(bounds_ptr + row)
    if bound == _NO_LIMITS:
        return
    token_C = piece * PIECE + tl.arange(0, PIECE)
    weight_C = _weights(logits_ptr, limits_ptr, highest_ptr, stride, row, token_C, V, P, PADDED_P)
    is_candidate_C = weight_C.to(tl.int32, bitcast=True) >= tl.maximum(bound, 1)
    index_C = tl.cumsum(is_candidate_C.to(tl.int32), axis=0) - 1
    count = tl.sum(is_candidate_C.to(tl.int32), axis=0)
    if count > 0:
        first = tl.atomic_add(counts_ptr + row, count)
        tl.store(candidates_ptr + row * V + first + index_C, weight_C, mask=is_candidate_C)


@triton.jit
def _find_thresholds(
    limits_ptr,
    sums_ptr,
    bounds_ptr,
    counts_ptr,
    candidates_ptr,
    thresholds_ptr,
    V: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Find the bits of the least weight that top-k and then top-p keep. 0: they keep all."""
    row = tl.program_id(0).to(tl.int64)
    threshold = tl.full((), 0, tl.int32)
    if tl.load(bounds_ptr + row) != _NO_LIMITS:
        candidates_ptr += row * V
        count = tl.load(counts_ptr + row)
        top_k = _limit(limits_ptr, row, _TOP_K).to(tl.int64)
        top_p = _limit(limits_ptr, row, _TOP_P)
        total = _sum_of_pieces(sums_ptr, row, P, PADDED_P)
        if top_k < V:
            threshold = _least_kept(candidates_ptr, count, top_k, True)
            if top_p < 1.0:
                total = _sum_of_largest(candidates_ptr, count, threshold, top_k)
        if top_p < 1.0:
            wanted = _least_sum(top_p, total)
            threshold = tl.maximum(threshold, _least_kept(candidates_ptr, count, wanted, False))
    tl.store(thresholds_ptr + row, threshold)


@triton.jit
def _sum_of_largest(weights_ptr, count, threshold, top_k):
    """Return the sum of the `top_k` largest weights. `threshold` has the bits of the last of them."""
    num_kept = tl.full((), 0, tl.int64)
    total = tl.full((), 0, tl.int64)
    for start in range(0, count, _TILE):
        index = start + tl.arange(0, _TILE)
        weight = tl.load(weights_ptr + index, mask=index < count, other=0.0)
        is_kept = (index < count) & (weight.to(tl.int32, bitcast=True) >= threshold)
        num_kept += tl.sum(is_kept.to(tl.int64), axis=0)
        total += tl.sum(tl.where(is_kept, _in_sums(weight), 0), axis=0)
    # of equal weights at the end, top-k counts only some
    return total - tl.maximum(num_kept - top_k, 0) * _in_sums(threshold.to(tl.float32, bitcast=True))


@triton.jit
def _sum_kept(
    logits_ptr,
    limits_ptr,
    highest_ptr,
    stride,
    thresholds_ptr,
    sums_ptr,
    V: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Replace a piece's sum of weights with the sum of those that are kept."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    threshold = tl.load(thresholds_ptr + row)
    if threshold == 0:
        return
    token_C = piece * PIECE + tl.arange(0, PIECE)
    weight_C = _weights(logits_ptr, limits_ptr, highest_ptr, stride, row, token_C, V, P, PADDED_P)
    is_kept_C = weight_C.to(tl.int32, bitcast=True) >= threshold
    tl.store(sums_ptr + row * P + piece, tl.sum(tl.where(is_kept_C, _in_sums(weight_C), 0), axis=0))


@triton.jit
def _pick(
    logits_ptr,
    limits_ptr,
    highest_ptr,
    stride,
    thresholds_ptr,
    sums_ptr,
    out_ptr,
    V: tl.constexpr,
    P: tl.constexpr,
    PADDED_P: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Find the first token at which the running sum of the kept weights reaches the drawn fraction of their sum."""
    row = tl.program_id(0).to(tl.int64)
    piece_P = tl.arange(0, PADDED_P)
    sum_P = tl.load(sums_ptr + row * P + piece_P, mask=piece_P < P, other=0)
    wanted = _least_sum(1.0 - _limit(limits_ptr, row, _UNIFORM), tl.sum(sum_P, axis=0))
    is_before_P = tl.cumsum(sum_P, axis=0) < wanted
    piece = tl.sum(is_before_P.to(tl.int32), axis=0)
    wanted -= tl.sum(tl.where(is_before_P, sum_P, 0), axis=0)
    token_C = piece * PIECE + tl.arange(0, PIECE)
    weight_C = _weights(logits_ptr, limits_ptr, highest_ptr, stride, row, token_C, V, P, PADDED_P)
    is_kept_C = weight_C.to(tl.int32, bitcast=True) >= tl.load(thresholds_ptr + row)
    sum_C = tl.cumsum(tl.where(is_kept_C, _in_sums(weight_C), 0), axis=0)
    index = tl.sum((sum_C < wanted).to(tl.int32), axis=0)
    tl.store(out_ptr + row, tl.minimum(piece * PIECE + index, V - 1).to(tl.int64))


@triton.jit(do_not_specialize=["num_rows"])
def _keyed_uniform(state_ptr, gamma_ptr, positions_ptr, out_ptr, num_rows, ROWS: tl.constexpr):
    row_R = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row_R = row_R < num_rows
    state_R = tl.load(state_ptr + row_R, mask=is_row_R, other=0).to(tl.uint64)
    gamma_R = tl.load(gamma_ptr + row_R, mask=is_row_R, other=0).to(tl.uint64)
    bits_R = state_R + gamma_R * tl.load(positions_ptr + row_R, mask=is_row_R, other=0).to(tl.uint64)
    bits_R = (bits_R ^ (bits_R >> 30)) * _MULTIPLIER_1
    bits_R = (bits_R ^ (bits_R >> 27)) * _MULTIPLIER_2
    bits_R ^= bits_R >> 31
    tl.store(out_ptr + row_R, (bits_R >> 11).to(tl.float64) * _UNIT, mask=is_row_R)
