"""The experts of sparse layers in Triton: which of them each token is routed to, and their results.

Pairs of a token and one of its experts are grouped by expert, and each group is cut into tiles of rows. The host knows
neither the groups nor their tiles. So launches have programs for the most tiles that there can be, and those that have
no rows end at once.

Products are added up in float32, from the first to the last, in tiles whose shape depends on nothing but the number of
tokens. A token's results are added in the order of its experts. So a token's bits don't depend on which other tokens
there are, only on how many: with `batch_invariant`, on neither.

Shape suffixes: N tokens, E experts, K experts of a token, P pairs of a token and one of its experts (N · K), D hidden
size, F size of an expert's hidden layer, M rows of a tile.
"""

from __future__ import annotations

# Triton is untyped:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUntypedFunctionDecorator=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from raycore.kernels.gates import gate_arguments
from raycore.kernels.gpu.bound_kernel import bound
from raycore.kernels.gpu.gates import gate_and_mul
from raycore.models.spec import Gate
from raycore.parts.experts.models import ExpertChoice

_FEW_PAIRS = 16
"""With at most so many pairs per expert on average, tiles have few rows."""
_FEW_ROWS, _MANY_ROWS, _COLUMNS, _INPUT_BYTES = 16, 64, 64, 128
"""Shapes of tiles."""
_GROUPED = 2048
"""Number of pairs that are grouped at a time."""
_LOWEST = tl.constexpr(-3.0e38)
"""The lowest number by which an expert is chosen."""
_SUMMED = 1024
"""Number of columns of a token's result that one program adds up."""


class _Groups(NamedTuple):
    """The pairs of this rank's experts, by expert."""

    pairs_P: Tensor
    """int32. The pairs of the first expert, then those of the second, and so on. Pairs are in order of tokens."""
    starts_E: Tensor
    """int32: where each expert's pairs start in `pairs_P`."""
    counts_E: Tensor
    """int32: each expert's number of pairs."""


def route(
    router_logits_NE: Tensor,
    num_experts_per_tok: int,
    router: ExpertChoice,
    dtype: torch.dtype,
    correction_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the weights, in `dtype`, and the ids, int32, of each token's experts. Both are [N, K].

    These are the experts that `router` chooses, in descending order of their corrected scores; of equal ones, those
    with the lowest ids. Weights are computed in float32.

    Args:
        correction_E: contiguous, if the router has a correction.
    """
    num_tokens, num_experts = router_logits_NE.shape
    assert router_logits_NE.stride(1) == 1 or num_experts == 1, "rows must be contiguous"
    assert num_experts_per_tok <= num_experts, "a token has at most as many experts as there are"
    assert router.has_correction == (correction_E is not None), "a correction, if the router has one"
    device = router_logits_NE.device
    weights_NK = torch.empty((num_tokens, num_experts_per_tok), dtype=dtype, device=device)
    ids_NK = torch.empty((num_tokens, num_experts_per_tok), dtype=torch.int32, device=device)
    if num_tokens:
        kernel = bound(
            _route,
            E=num_experts,
            PADDED_E=triton.next_power_of_2(num_experts),
            K=num_experts_per_tok,
            PADDED_K=triton.next_power_of_2(num_experts_per_tok),
            SCORES=router.scores,
            IS_NORMALIZED=router.is_normalized,
            LEAST_SUM=router.least_sum,
            SCALING=router.scaling,
            GROUPS=router.num_groups,
            PADDED_GROUPS=triton.next_power_of_2(router.num_groups),
            CHOSEN_GROUPS=router.num_chosen_groups,
            COMPARED=router.num_compared,
            num_warps=1 if num_experts <= 256 else 4,
        )
        stride = router_logits_NE.stride(0) if num_tokens > 1 else num_experts
        kernel((num_tokens, 1, 1), router_logits_NE, correction_E, stride, weights_NK, ids_NK)
    return weights_NK, ids_NK


def apply_experts(
    x_ND: Tensor,
    weights_NK: Tensor,
    ids_NK: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    first_expert: int,
    *,
    gate_up_bias_EF: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    gate: Gate = "silu",
    batch_invariant: bool = False,
) -> Tensor:
    """Return [N, D]: for each token, the weighted sum of `down(silu(gate(x)) · up(x))` over its experts on this rank.

    With another `gate`, what that says instead of `silu(gate(x)) · up(x)`. The sum is rounded once, and so is the input
    of `down`. Experts on other ranks add nothing.

    Args:
        weights_NK, ids_NK: contiguous, as `route` returns them.
        gate_up_EFD: contiguous weights [E, 2F, D] of this rank's experts: the rows of the gate, then those of up.
        down_EDF: contiguous weights [E, D, F].
        first_expert: id of this rank's first expert. Its experts have adjacent ids.
        gate_up_bias_EF, down_bias_ED: contiguous biases. None: there are none.
        batch_invariant: use tiles of the same shape for every number of tokens.
    """
    (num_tokens, dim), num_own, expert_dim = x_ND.shape, len(gate_up_EFD), down_EDF.shape[2]
    assert gate_up_EFD.is_contiguous(), "weights are contiguous"
    assert down_EDF.is_contiguous(), "weights are contiguous"
    assert x_ND.stride(1) == 1 or dim == 1, "rows must be contiguous"
    assert weights_NK.is_contiguous(), "weights of pairs are contiguous"
    assert ids_NK.is_contiguous(), "ids of pairs are contiguous"
    out_ND = torch.empty((num_tokens, dim), dtype=x_ND.dtype, device=x_ND.device)
    if not num_tokens:
        return out_ND
    num_pairs, per_token = ids_NK.numel(), ids_NK.shape[1]
    is_few = not batch_invariant and num_pairs <= _FEW_PAIRS * num_own
    for bias in (gate_up_bias_EF, down_bias_ED):
        assert bias is None or bias.is_contiguous(), "biases are contiguous"
    num_rows, num_inputs = _FEW_ROWS if is_few else _MANY_ROWS, _INPUT_BYTES // x_ND.element_size()
    # in every tile there is a pair, and in each group, one tile may not be full
    num_tiles = min(triton.cdiv(num_pairs, num_rows) + num_own, num_pairs)
    groups = _group(ids_NK, num_own, first_expert)
    sizes = {
        "E": num_own,
        "PADDED_E": triton.next_power_of_2(num_own),
        "F": expert_dim,
        "D": dim,
        "K": per_token,
        "M": num_rows,
        "COLUMNS": _COLUMNS,
        "INPUTS": num_inputs,
    }

    hidden_PF = torch.empty((num_pairs, expert_dim), dtype=x_ND.dtype, device=x_ND.device)
    x_stride = x_ND.stride(0) if num_tokens > 1 else dim
    name, alpha, limit = gate_arguments(gate)
    kernel = bound(_gate_and_up, **sizes, GATE=name, ALPHA=alpha, LIMIT=limit, num_warps=4, num_stages=3)
    grid = num_tiles * triton.cdiv(expert_dim, _COLUMNS), 1, 1
    kernel(grid, x_ND, x_stride, gate_up_EFD, gate_up_bias_EF, hidden_PF, *groups)
    results_PD = torch.empty((num_pairs, dim), dtype=torch.float32, device=x_ND.device)
    kernel = bound(_down, **sizes, num_warps=4, num_stages=4)
    grid = num_tiles * triton.cdiv(dim, _COLUMNS), 1, 1
    kernel(grid, hidden_PF, down_EDF, down_bias_ED, weights_NK, results_PD, *groups)
    kernel = bound(_sum_experts, E=num_own, D=dim, K=per_token, SUMMED=_SUMMED)
    kernel((num_tokens, triton.cdiv(dim, _SUMMED), 1), results_PD, ids_NK, out_ND, first_expert)
    return out_ND


def _group(ids_NK: Tensor, num_own: int, first_expert: int) -> _Groups:
    pairs_P = torch.empty(ids_NK.numel(), dtype=torch.int32, device=ids_NK.device)
    starts_E, counts_E = torch.empty((2, num_own), dtype=torch.int32, device=ids_NK.device)
    kernel = bound(_group_pairs, GROUPED=_GROUPED)
    kernel((num_own, 1, 1), ids_NK, pairs_P, starts_E, counts_E, first_expert, ids_NK.numel())
    return _Groups(pairs_P, starts_E, counts_E)


@triton.jit
def _route(
    logits_ptr,
    correction_ptr,
    stride,
    weights_ptr,
    ids_ptr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SCORES: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    LEAST_SUM: tl.constexpr,
    SCALING: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """One program routes one token.

    Args:
        correction_ptr: [E]. None: there is no correction.
    """
    token = tl.program_id(0).to(tl.int64)
    expert_E, choice_K = tl.arange(0, PADDED_E), tl.arange(0, PADDED_K)
    logit_E = tl.load(logits_ptr + token * stride + expert_E, mask=expert_E < E, other=float("-inf")).to(tl.float32)
    if SCORES == "softmax":
        weight_E = tl.exp(logit_E - tl.max(logit_E, axis=0))
        score_E = weight_E / tl.sum(weight_E, axis=0)
    elif SCORES == "sigmoid":
        score_E = 1.0 / (1.0 + tl.exp(-logit_E))
    else:
        tl.static_assert(SCORES == "softmax_of_chosen", "unknown scores")
        score_E = logit_E
    choice_E = score_E
    if correction_ptr is not None:
        choice_E += tl.load(correction_ptr + expert_E, mask=expert_E < E, other=0.0).to(tl.float32)
    # experts whose score is NaN come last, but before those that there aren't or that are chosen already
    rank_E = tl.where(choice_E == choice_E, tl.maximum(choice_E, _LOWEST), 1.05 * _LOWEST)
    if GROUPS > 1:
        rank_E = _in_best_groups(rank_E, expert_E, E // GROUPS, GROUPS, PADDED_GROUPS, CHOSEN_GROUPS, COMPARED)
    rank_E = tl.where(expert_E < E, rank_E, float("-inf"))
    weight_K = tl.zeros((PADDED_K,), dtype=tl.float32)
    id_K = tl.zeros((PADDED_K,), dtype=tl.int32)
    for choice in range(K):
        chosen = tl.min(tl.where(rank_E == tl.max(rank_E, axis=0), expert_E, PADDED_E), axis=0)
        weight = tl.sum(tl.where(expert_E == chosen, score_E, 0.0), axis=0)
        weight_K = tl.where(choice_K == choice, weight, weight_K)
        id_K = tl.where(choice_K == choice, chosen, id_K)
        rank_E = tl.where(expert_E == chosen, float("-inf"), rank_E)
    if SCORES == "softmax_of_chosen":
        weight_K = tl.where(choice_K < K, weight_K, float("-inf"))
        weight_K = tl.exp(weight_K - tl.max(weight_K, axis=0))
        weight_K /= tl.sum(weight_K, axis=0)
    if IS_NORMALIZED:
        total = tl.sum(weight_K, axis=0)
        if SCORES == "sigmoid":
            total += LEAST_SUM
        weight_K /= total
    if SCALING != 1.0:
        weight_K *= SCALING
    offset_K = token * K + choice_K
    tl.store(weights_ptr + offset_K, weight_K.to(weights_ptr.dtype.element_ty), mask=choice_K < K)
    tl.store(ids_ptr + offset_K, id_K, mask=choice_K < K)


@triton.jit
def _in_best_groups(
    rank_E,
    expert_E,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    PADDED_GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Returns `rank_E` with the lowest ranks for experts outside of the groups whose best have the highest sums."""
    group_E, group_G = expert_E // SIZE, tl.arange(0, PADDED_GROUPS)
    sum_G = tl.full((PADDED_GROUPS,), float("-inf"), tl.float32)
    for group in range(GROUPS):
        own_E = tl.where(group_E == group, rank_E, float("-inf"))
        best = tl.max(own_E, axis=0)
        if COMPARED > 1 and SIZE > 1:
            first = tl.min(tl.where(own_E == best, expert_E, GROUPS * SIZE), axis=0)
            best += tl.max(tl.where(expert_E == first, float("-inf"), own_E), axis=0)
        sum_G = tl.where(group_G == group, tl.maximum(best, _LOWEST), sum_G)
    is_in_E = expert_E < 0
    for _ in range(CHOSEN):
        chosen = tl.min(tl.where(sum_G == tl.max(sum_G, axis=0), group_G, PADDED_GROUPS), axis=0)
        is_in_E = is_in_E | (group_E == chosen)
        sum_G = tl.where(group_G == chosen, float("-inf"), sum_G)
    return tl.where(is_in_E, rank_E, 1.1 * _LOWEST)


@triton.jit(do_not_specialize=["first_expert", "num_pairs"])
def _group_pairs(ids_ptr, pairs_ptr, starts_ptr, counts_ptr, first_expert, num_pairs, GROUPED: tl.constexpr):
    """One program collects the pairs of one expert, behind those of the experts before it."""
    expert = tl.program_id(0)
    num_before = tl.full((), 0, tl.int32)
    for start in range(0, num_pairs, GROUPED):
        pair = start + tl.arange(0, GROUPED)
        own = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) - first_expert
        num_before += tl.sum(((pair < num_pairs) & (own >= 0) & (own < expert)).to(tl.int32), axis=0)
    end = num_before
    for start in range(0, num_pairs, GROUPED):
        pair = start + tl.arange(0, GROUPED)
        own = tl.load(ids_ptr + pair, mask=pair < num_pairs, other=-1) - first_expert
        is_in_group = (pair < num_pairs) & (own == expert)
        number = tl.cumsum(is_in_group.to(tl.int32), axis=0)
        tl.store(pairs_ptr + end + number - 1, pair, mask=is_in_group)
        end += tl.sum(is_in_group.to(tl.int32), axis=0)
    tl.store(starts_ptr + expert, num_before)
    tl.store(counts_ptr + expert, end - num_before)


@triton.jit
def _tile_of(tile, starts_ptr, counts_ptr, E: tl.constexpr, PADDED_E: tl.constexpr, M: tl.constexpr):
    """Return a tile's expert, its first index among the grouped pairs, and its number of rows: 0 or less if there is
    no such tile."""
    expert_E = tl.arange(0, PADDED_E)
    count_E = tl.load(counts_ptr + expert_E, mask=expert_E < E, other=0)
    num_tiles_E = (count_E + M - 1) // M
    is_before_E = tl.cumsum(num_tiles_E, axis=0) <= tile
    expert = tl.sum(is_before_E.to(tl.int32), axis=0)
    first = (tile - tl.sum(tl.where(is_before_E, num_tiles_E, 0), axis=0)) * M
    start = tl.load(starts_ptr + expert, mask=expert < E, other=0)
    count = tl.load(counts_ptr + expert, mask=expert < E, other=0)
    return expert, start + first, tl.minimum(count - first, M)


@triton.jit
def _gate_and_up(
    x_ptr,
    x_stride,
    gate_up_ptr,
    bias_ptr,
    hidden_ptr,
    pairs_ptr,
    starts_ptr,
    counts_ptr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
    GATE: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """One program computes `activation(gate(x)) · up(x)` for one tile. Rows of the result are in the order of `pairs`.

    Args:
        bias_ptr: [E, 2F]. None: there is no bias.
    """
    num_tiles_F: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    expert, start, num_rows = _tile_of(program // num_tiles_F, starts_ptr, counts_ptr, E, PADDED_E, M)
    if num_rows <= 0:
        return
    row_M = tl.arange(0, M)
    is_row_M = row_M < num_rows
    token_M = tl.load(pairs_ptr + start + row_M, mask=is_row_M, other=0) // K
    column_F = (program % num_tiles_F) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_F = column_F < F
    input_D = tl.arange(0, INPUTS)
    x_ptrs_MD = x_ptr + token_M.to(tl.int64)[:, None] * x_stride + input_D[None, :]
    gate_row_F = expert.to(tl.int64) * (2 * F) + column_F
    gate_ptrs_DF = gate_up_ptr + gate_row_F[None, :] * D + input_D[:, None]
    up_ptrs_DF = gate_ptrs_DF + F * D
    gate_MF = tl.zeros((M, COLUMNS), dtype=tl.float32)
    up_MF = tl.zeros((M, COLUMNS), dtype=tl.float32)
    for first in range(0, D, INPUTS):
        is_input_D = first + input_D < D
        is_weight_DF = is_input_D[:, None] & is_column_F[None, :]
        x_MD = tl.load(x_ptrs_MD + first, mask=is_row_M[:, None] & is_input_D[None, :], other=0.0)
        gate_DF = tl.load(gate_ptrs_DF + first, mask=is_weight_DF, other=0.0)
        up_DF = tl.load(up_ptrs_DF + first, mask=is_weight_DF, other=0.0)
        gate_MF = tl.dot(x_MD, gate_DF, gate_MF, input_precision="ieee")
        up_MF = tl.dot(x_MD, up_DF, up_MF, input_precision="ieee")
    if bias_ptr is not None:
        gate_MF += tl.load(bias_ptr + gate_row_F, mask=is_column_F, other=0.0).to(tl.float32)[None, :]
        up_MF += tl.load(bias_ptr + gate_row_F + F, mask=is_column_F, other=0.0).to(tl.float32)[None, :]
    hidden_MF = gate_and_mul(gate_MF, up_MF, GATE, ALPHA, LIMIT)
    offset_M = (start + row_M).to(tl.int64)
    hidden_ptrs_MF = hidden_ptr + offset_M[:, None] * F + column_F[None, :]
    tl.store(hidden_ptrs_MF, hidden_MF.to(hidden_ptr.dtype.element_ty), mask=is_row_M[:, None] & is_column_F[None, :])


@triton.jit
def _down(
    hidden_ptr,
    down_ptr,
    bias_ptr,
    weights_ptr,
    results_ptr,
    pairs_ptr,
    starts_ptr,
    counts_ptr,
    E: tl.constexpr,
    PADDED_E: tl.constexpr,
    F: tl.constexpr,
    D: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """One program computes one tile of the experts' weighted results, and stores each row at its pair's index."""
    num_tiles_D: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    expert, start, num_rows = _tile_of(program // num_tiles_D, starts_ptr, counts_ptr, E, PADDED_E, M)
    if num_rows <= 0:
        return
    row_M = tl.arange(0, M)
    is_row_M = row_M < num_rows
    column_D = (program % num_tiles_D) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_D = column_D < D
    input_F = tl.arange(0, INPUTS)
    hidden_ptrs_MF = hidden_ptr + (start + row_M).to(tl.int64)[:, None] * F + input_F[None, :]
    down_row_D = expert.to(tl.int64) * D + column_D
    down_ptrs_FD = down_ptr + down_row_D[None, :] * F + input_F[:, None]
    sum_MD = tl.zeros((M, COLUMNS), dtype=tl.float32)
    for first in range(0, F, INPUTS):
        is_input_F = first + input_F < F
        hidden_MF = tl.load(hidden_ptrs_MF + first, mask=is_row_M[:, None] & is_input_F[None, :], other=0.0)
        down_FD = tl.load(down_ptrs_FD + first, mask=is_input_F[:, None] & is_column_D[None, :], other=0.0)
        sum_MD = tl.dot(hidden_MF, down_FD, sum_MD, input_precision="ieee")
    if bias_ptr is not None:
        sum_MD += tl.load(bias_ptr + down_row_D, mask=is_column_D, other=0.0).to(tl.float32)[None, :]
    pair_M = tl.load(pairs_ptr + start + row_M, mask=is_row_M, other=0)
    weight_M = tl.load(weights_ptr + pair_M, mask=is_row_M, other=0.0).to(tl.float32)
    result_ptrs_MD = results_ptr + pair_M.to(tl.int64)[:, None] * D + column_D[None, :]
    tl.store(result_ptrs_MD, sum_MD * weight_M[:, None], mask=is_row_M[:, None] & is_column_D[None, :])


@triton.jit(do_not_specialize=["first_expert"])
def _sum_experts(
    results_ptr, ids_ptr, out_ptr, first_expert, E: tl.constexpr, D: tl.constexpr, K: tl.constexpr, SUMMED: tl.constexpr
):
    """One program adds up the results of one token's experts, those of other ranks' left out."""
    token = tl.program_id(0).to(tl.int64)
    column_D = tl.program_id(1) * SUMMED + tl.arange(0, SUMMED)
    sum_D = tl.zeros((SUMMED,), dtype=tl.float32)
    for choice in tl.static_range(K):
        own = tl.load(ids_ptr + token * K + choice) - first_expert
        result_ptrs_D = results_ptr + (token * K + choice) * D + column_D
        num_columns = tl.where((own >= 0) & (own < E), D, 0)
        sum_D += tl.load(result_ptrs_D, mask=column_D < num_columns, other=0.0)
    tl.store(out_ptr + token * D + column_D, sum_D.to(out_ptr.dtype.element_ty), mask=column_D < D)
