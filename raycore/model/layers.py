"""Layer arithmetic other than attention: norms, linear layers, and sums over tensor-parallel ranks.

Plain functions and classes over packed tensors that make as few torch calls as possible: with small models and small
batches, the number of calls determines a step's time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from raycore.model.collectives import Collectives

_PACK_FROM_ELEMENTS = 1 << 19
"""Float32 weights with fewer elements aren't packed: oneDNN's call costs some 20 µs more than the plain one, which
packing makes up for only above about this size."""


class Linear(Protocol):
    """`x @ weight.T + bias` for a weight [O, I]."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        """[T, O]."""
        ...

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        """`residual + self(x)`; may overwrite `residual`."""
        ...


class PlainLinear:
    """A linear layer over an unpacked weight."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._weight_OI = weight_OI
        self._weight_IO = weight_OI.t()
        self._bias_O = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self._bias_O is None:
            return torch.mm(x_TI, self._weight_IO)
        return torch.addmm(self._bias_O, x_TI, self._weight_IO)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        if self._bias_O is not None:
            residual_TO += self._bias_O
        return residual_TO.addmm_(x_TI, self._weight_IO)


class PackedLinear:
    """A linear layer over a weight in oneDNN's own layout, for any number of rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
        self._bias_O = bias_O
        self._linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self._linear_binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._linear(x_TI, self._packed, self._bias_O, "none", [], "")

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return self._linear_binary(x_TI, residual_TO, self._packed, self._bias_O, "add")


class ReducedLinear:
    """A linear layer whose input is split over tensor-parallel ranks: the ranks' results are summed."""

    def __init__(self, linear: Linear, ranks: TensorParallel) -> None:
        self._linear = linear
        self._ranks = ranks

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._ranks.all_reduce_(self._linear(x_TI))

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return residual_TO.add_(self(x_TI))


class TensorParallel:
    """The tensor-parallel ranks of a model, of which this is number `rank`. A single rank sends nothing."""

    def __init__(self, rank: int = 0, size: int = 1, collectives: Collectives | None = None) -> None:
        """`collectives`: None for a single rank."""
        self.rank = rank
        self.size = size
        self._collectives = collectives

    def all_reduce_(self, x: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        return x if self._collectives is None else self._collectives.all_reduce_(x)

    def all_gather_columns(self, x_RV: Tensor) -> Tensor:
        """The ranks' columns side by side, [R, V · size]."""
        return x_RV if self._collectives is None else torch.cat(self._collectives.all_gather(x_RV), dim=1)

    def leave(self) -> None:
        """Leave the group of ranks. Idempotent."""
        if self._collectives is not None:
            self._collectives.close()


def make_linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
    """The faster kind of linear layer for this weight on this machine."""
    is_small = weight_OI.dtype == torch.float32 and weight_OI.numel() < _PACK_FROM_ELEMENTS
    if weight_OI.device.type != "cpu" or is_small or not can_pack(weight_OI.dtype):
        return PlainLinear(weight_OI, bias_O)
    return PackedLinear(weight_OI, bias_O)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs linear weights of this type here; it refuses types that the processor lacks."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        layer = PackedLinear(torch.zeros(32, 32, dtype=dtype), None)
        layer(torch.zeros(1, 32, dtype=dtype))
    except RuntimeError:
        return False
    return True


class RMSNorm:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension.

    In float32 on a CPU it is computed as `x / hypot(|x|, sqrt(D·eps)) · (weight·sqrt(D))`, in five calls of 1 to 4 µs;
    torch's own takes 13 µs.
    """

    def __init__(self, weight: Tensor, eps: float, batch_invariant: bool = False) -> None:
        """`batch_invariant`: compute the root with correctly rounded operations, so that an element's index doesn't
        matter."""
        self._batch_invariant = batch_invariant
        self._dim = weight.shape[-1]
        self._eps = eps
        self._weight = weight
        self._scaled_weight = weight * math.sqrt(self._dim)
        self._least_norm = torch.full((1,), math.sqrt(self._dim * eps), device=weight.device)
        self._by_hand = weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, x: Tensor) -> Tensor:
        """Normalised copy of `x`."""
        if not self._by_hand:
            return functional.rms_norm(x, (self._dim,), None, self._eps).mul_(self._weight)
        return (x * self._inverse_norm(x)).mul_(self._scaled_weight)

    def apply_(self, x: Tensor) -> None:
        """The same in place."""
        if not self._by_hand:
            x.copy_(self(x))
        else:
            x.mul_(self._inverse_norm(x)).mul_(self._scaled_weight)

    def _inverse_norm(self, x: Tensor) -> Tensor:
        norm = cast(Tensor, torch.linalg.vector_norm(x, 2, -1, True))  # pyright: ignore[reportUnknownMemberType]
        if self._batch_invariant:
            return norm.square_().add_(self._dim * self._eps).sqrt_().reciprocal_()
        return norm.hypot_(self._least_norm).reciprocal_()


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """`silu(gate) · up` for a fused [T, 2F]."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
    return functional.silu(gate_TF).mul_(up_TF)
