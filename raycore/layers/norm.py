"""Norms in plain torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from raycore.layers.rows import on_one_thread
from raycore.parallel.tensor_parallel import TensorParallel


class RMSNorm:
    """`x / sqrt(mean(x²) + eps) · (offset + weight)` over the last dimension.

    In float32 on a CPU, this is computed as `x / hypot(|x|, sqrt(D·eps)) · (weight·sqrt(D))`, where D is the size of
    the last dimension. This makes five torch calls of 1 to 4 µs each, while torch's own `rms_norm` takes 13 µs.
    """

    def __init__(self, weight: Tensor, eps: float, batch_invariant: bool = False, offset: float = 0.0) -> None:
        """
        Args:
            batch_invariant: use the square root, which is correctly rounded, instead of `hypot`. An element's result
                then doesn't depend on its index.
            offset: is added to the weight. If it isn't 0, results are rounded once, in 16 bits, too.
        """
        self._batch_invariant = batch_invariant
        self._dim = weight.shape[-1]
        self._eps = eps
        self.weight = weight
        self._has_offset = offset != 0.0
        self._weight = weight.float() + offset if self._has_offset else weight
        self._scaled_weight = self._weight * math.sqrt(self._dim)
        self._least_norm = torch.full((1,), math.sqrt(self._dim * eps), device=weight.device)
        self._by_hand = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Return a normalized copy of `x`."""
        return on_one_thread(self._normalized, x) if self._batch_invariant else self._normalized(x)

    def apply_(self, x: Tensor) -> None:
        """Normalize `x` in place."""
        if self._batch_invariant or not self._by_hand:
            x.copy_(self(x))
        else:
            x.mul_(self._inverse_norm(x)).mul_(self._scaled_weight)

    def _normalized(self, x: Tensor) -> Tensor:
        if not self._by_hand:
            wide = x.float() if self._has_offset else x
            return functional.rms_norm(wide, (self._dim,), None, self._eps).mul_(self._weight).to(x.dtype)
        return (x * self._inverse_norm(x)).mul_(self._scaled_weight)

    def _inverse_norm(self, x: Tensor) -> Tensor:
        norm = cast(Tensor, torch.linalg.vector_norm(x, 2, -1, True))  # pyright: ignore[reportUnknownMemberType]
        if self._batch_invariant:
            return norm.square_().add_(self._dim * self._eps).sqrt_().reciprocal_()
        return norm.hypot_(self._least_norm).reciprocal_()


class LayerNorm:
    """`(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias` over the last dimension."""

    def __init__(self, weight_D: Tensor, bias_D: Tensor | None, eps: float, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: make the bits of a row's result independent of the other rows."""
        self.weight = weight_D
        self._bias_D = bias_D
        self._eps = eps
        self._batch_invariant = batch_invariant

    def __call__(self, x: Tensor) -> Tensor:
        """Return a normalized copy of `x`."""
        return on_one_thread(self._normalized, x) if self._batch_invariant else self._normalized(x)

    def _normalized(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, self.weight.shape, self.weight, self._bias_D, self._eps)


class AddLayerNorm:
    """Adds a block's result to the residual stream, which is in float32, and computes the `LayerNorm` of the sum."""

    def __init__(
        self, weight_D: Tensor, bias_D: Tensor | None, eps: float, *, keeps_sum: bool, batch_invariant: bool = False
    ) -> None:
        """
        Args:
            keeps_sum: whether the stream goes on with the sum. Otherwise, with the normalized sum.
            batch_invariant: make the bits of a row's result independent of the other rows.
        """
        bias_D = None if bias_D is None else bias_D.float()
        self._norm = LayerNorm(weight_D.float(), bias_D, eps, batch_invariant=batch_invariant)
        self._keeps_sum = keeps_sum

    def __call__(self, residual_TD: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream, and the normalized sum in the dtype of `x_TD`. May overwrite both arguments."""
        residual_TD += x_TD
        normalized_TD = self._norm(residual_TD)
        return residual_TD if self._keeps_sum else normalized_TD, normalized_TD.to(x_TD.dtype)


class WidthNorm:
    """RMS norms of queries and of keys, each over all heads of all tensor-parallel ranks together."""

    def __init__(
        self,
        q_weight_O: Tensor,
        k_weight_O: Tensor,
        eps: float,
        ranks: TensorParallel,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            q_weight_O, k_weight_O: for the rank's rows of the projections.
            batch_invariant: make the bits of a row's result independent of the other rows.
        """
        self._weights = q_weight_O, k_weight_O
        self._ranks = ranks
        self._eps = eps
        # where several ranks hold the same key heads, the sum has these several times, too
        self._num_summed = [len(weight) * ranks.size for weight in self._weights]
        self._batch_invariant = batch_invariant

    def apply_(self, qkv_TO: Tensor) -> None:
        """Normalize the queries and keys of the rank's rows [T, O] in place."""
        num_q, num_k = map(len, self._weights)
        parts = qkv_TO[:, :num_q], qkv_TO[:, num_q : num_q + num_k]
        wide = [part.float() for part in parts]
        groups = [wide_TO.unsqueeze(1) for wide_TO in wide]
        sums_T2 = sums_over_ranks(groups, self._ranks, batch_invariant=self._batch_invariant)
        for part, wide_TO, weight, sum_T, num_summed in zip(
            parts, wide, self._weights, sums_T2.unbind(1), self._num_summed, strict=True
        ):
            inverse_T1 = torch.rsqrt(sum_T / num_summed + self._eps)[:, None]
            part.copy_((wide_TO * inverse_T1).mul_(weight))


class OwnHeadNorm:
    """A layer norm of each query and key head, with weights of its own and no bias."""

    def __init__(self, weight_NH: Tensor, eps: float, *, batch_invariant: bool = False) -> None:
        """
        Args:
            weight_NH: for the rank's query heads, then its key heads.
            batch_invariant: make the bits of a row's result independent of the other rows.
        """
        self._weight_NH = weight_NH.float()
        self._eps = eps
        self._batch_invariant = batch_invariant

    def apply_(self, qkv_TO: Tensor) -> None:
        """Normalize the queries and keys of the rank's rows [T, O] in place."""
        num_heads, head_dim = self._weight_NH.shape
        heads_TNH = qkv_TO[:, : num_heads * head_dim].view(len(qkv_TO), num_heads, head_dim)
        heads_TNH.copy_(
            on_one_thread(self._normalized, heads_TNH) if self._batch_invariant else self._normalized(heads_TNH)
        )

    def _normalized(self, heads_TNH: Tensor) -> Tensor:
        wide_TNH = heads_TNH.float()
        return functional.layer_norm(wide_TNH, wide_TNH.shape[2:], None, None, self._eps).mul_(self._weight_NH)


class GroupNorm:
    """An RMS norm of each of several groups of elements. A single group may be divided over tensor-parallel ranks."""

    def __init__(
        self, weight_O: Tensor, num_groups: int, eps: float, ranks: TensorParallel, *, batch_invariant: bool = False
    ) -> None:
        """
        Args:
            weight_O: for the rank's elements.
            ranks: those over which each group is divided.
            batch_invariant: make the bits of a row's result independent of the other rows.
        """
        self.weight = weight_O
        self._num_groups = num_groups
        self._eps = eps
        self._ranks = ranks
        self._group_size = len(weight_O) // num_groups * ranks.size
        self._batch_invariant = batch_invariant

    def __call__(self, x: Tensor) -> Tensor:
        """Return a normalized copy of `x` [T, O]."""
        wide_TGX = x.float().view(len(x), self._num_groups, -1)
        sums_TG = sums_over_ranks([wide_TGX], self._ranks, batch_invariant=self._batch_invariant)
        inverse_TG1 = torch.rsqrt(sums_TG / self._group_size + self._eps)[:, :, None]
        return (wide_TGX * inverse_TG1).view(x.shape).to(x.dtype).mul_(self.weight)


def sums_over_ranks(
    groups: Sequence[Tensor], ranks: TensorParallel, *, batch_invariant: bool, squared: bool = True
) -> Tensor:
    """Return the sums [T, G] of the squares of groups of elements that are divided over ranks.

    Args:
        groups: [T, G1, X1], [T, G2, X2], ... of this rank. G is G1 + G2 + ...
        batch_invariant: make the bits of a row's sums independent of the other rows, and of the number of ranks, if
            `num_parts` of all X isn't 0.
        squared: add up squares. Otherwise, the elements themselves.
    """
    if not batch_invariant:
        return ranks.all_reduce_(torch.cat([(each.square() if squared else each).sum(dim=2) for each in groups], dim=1))
    count = min(ranks.num_parts(each.shape[2]) for each in groups)

    def sums(x_TGX: Tensor) -> Tensor:
        parts_TGPX = x_TGX.view(*x_TGX.shape[:2], max(count, 1), -1)
        return (parts_TGPX.square() if squared else parts_TGPX).sum(dim=3)

    sums_TGP = torch.cat([on_one_thread(sums, each) for each in groups], dim=1)
    return ranks.sum_parts(sums_TGP.unbind(2)) if count else ranks.all_reduce_(sums_TGP.squeeze(2))
