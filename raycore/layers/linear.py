"""Linear layers in plain torch.

They make as few torch calls as possible, because with small models and small batches, the number of calls determines a
step's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from raycore.layers.rows import Tiles, is_order_invariant
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.weights.weight import Weight

_PACK_FROM_ELEMENTS = 1 << 19
"""Float32 weights with fewer elements than this aren't packed.

A call of oneDNN takes some 20 µs more than a plain one. Only for larger weights does packing save more than that.
"""


class Linear(Protocol):
    """A linear layer: `x @ weight.T + bias` for a weight [O, I]."""

    @property
    def weight(self) -> Weight:
        """The weight that the layer was made of: a copy, if the layer keeps it in another form."""
        ...

    @property
    def bias(self) -> Tensor | None: ...

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the layer's output for `x_TI`, [T, O]."""
        ...

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Return `residual_TO` plus the layer's output for `x_TI`. May overwrite `residual_TO`."""
        ...


class PlainLinear:
    """A linear layer with an ordinary weight tensor."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight = weight_OI
        self.bias = bias_O
        self._weight_IO = weight_OI.t()

    def __call__(self, x_TI: Tensor) -> Tensor:
        if self.bias is None:
            return torch.mm(x_TI, self._weight_IO)
        return torch.addmm(self.bias, x_TI, self._weight_IO)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        if self.bias is not None:
            residual_TO += self.bias
        return residual_TO.addmm_(x_TI, self._weight_IO)


class PackedLinear:
    """A linear layer whose weight is packed: in oneDNN's own layout, for any number of rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI, None)
        self.bias = bias_O
        self._linear: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.default
        self._linear_binary: Callable[..., Tensor] = torch.ops.mkldnn._linear_pointwise.binary

    @property
    def weight(self) -> Tensor:
        return self._packed.to_dense()

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._linear(x_TI, self._packed, self.bias, "none", [], "")

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return self._linear_binary(x_TI, residual_TO, self._packed, self.bias, "add")


class AroundLinear:
    """What is around a linear layer, and has its weight."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    @property
    def weight(self) -> Weight:
        return self._linear.weight

    @property
    def bias(self) -> Tensor | None:
        return self._linear.bias


class ReducedLinear(AroundLinear):
    """A linear layer whose input is split over tensor-parallel ranks. The ranks' results are summed."""

    def __init__(self, linear: Linear, ranks: TensorParallel) -> None:
        super().__init__(linear)
        self._ranks = ranks

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._ranks.all_reduce_(self._linear(x_TI))

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return residual_TO.add_(self(x_TI))


class LinearParts:
    """A linear layer whose inputs are divided into parts. Each part has a result of its own."""

    def __init__(self, parts: Sequence[Linear]) -> None:
        """`parts`: those of this rank, in order. Only the first one may have a bias."""
        self._parts = parts

    @property
    def weight(self) -> Weight:
        weights = [part.weight for part in self._parts]
        assert all(isinstance(weight, Tensor) for weight in weights), "quantized layers have no parts"
        return torch.cat(cast("list[Tensor]", weights), dim=1)

    @property
    def bias(self) -> Tensor | None:
        return self._parts[0].bias

    def __call__(self, x_TI: Tensor) -> list[Tensor]:
        """Return each part's output, [T, O]. Their sum is the layer's."""
        inputs = x_TI.chunk(len(self._parts), dim=1)
        return [part(x.contiguous()) for part, x in zip(self._parts, inputs, strict=True)]


class LinearInParts:
    """A layer as `ReducedLinear`, whose sums have the same bits for any number of ranks that divides `REDUCTION_PARTS`.

    All ranks together divide the inputs into `REDUCTION_PARTS` parts. Each part's result is rounded like that of a rank
    of its own, and `TensorParallel.sum_parts` adds them up.
    """

    def __init__(self, parts: LinearParts, ranks: TensorParallel) -> None:
        self._parts = parts
        self._ranks = ranks

    @property
    def weight(self) -> Weight:
        return self._parts.weight

    @property
    def bias(self) -> Tensor | None:
        return self._parts.bias

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._ranks.sum_parts([part.float() for part in self._parts(x_TI)]).to(x_TI.dtype)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return residual_TO.add_(self(x_TI))


class TiledLinear(AroundLinear):
    """A linear layer that is computed in tiles, for batch invariance."""

    def __init__(self, linear: Linear, tiles: Tiles) -> None:
        super().__init__(linear)
        self._tiles = tiles

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._tiles.apply(self._linear, x_TI)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return self._tiles.apply(self._linear.add_to, residual_TO, x_TI)

    def is_order_invariant(self, x_TI: Tensor) -> bool:
        """Whether the bits of each row's result stay the same when the rows of the tile `x_TI` are permuted."""
        residual_TO = torch.zeros_like(self._linear(x_TI))
        checks = [is_order_invariant(self._linear, x_TI), is_order_invariant(self._linear.add_to, residual_TO, x_TI)]
        return all(checks)


def make_linear(weight_OI: Tensor, bias_O: Tensor | None = None) -> Linear:
    """Return a `PackedLinear` where that is faster, otherwise a `PlainLinear`.

    `PackedLinear` is faster on CPUs if oneDNN supports the weight's dtype, except for small float32 weights.
    """
    is_small = weight_OI.dtype == torch.float32 and weight_OI.numel() < _PACK_FROM_ELEMENTS
    if weight_OI.device.type != "cpu" or is_small or not can_pack(weight_OI.dtype):
        return PlainLinear(weight_OI, bias_O)
    return PackedLinear(weight_OI, bias_O)


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs linear weights of this dtype on this machine. It refuses dtypes that the CPU lacks."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        layer = PackedLinear(torch.zeros(32, 32, dtype=dtype), None)
        layer(torch.zeros(1, 32, dtype=dtype))
    except RuntimeError:
        return False
    return True
