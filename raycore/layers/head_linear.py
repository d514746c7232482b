"""A linear layer for each head of a token.

Shape suffixes: T tokens, N heads, I inputs and O outputs of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from raycore.layers.linear import Linear


class PerHeadLinear(Protocol):
    """`out[:, n] = x[:, n] @ weight[n].T` for a weight [N, O, I]."""

    @property
    def weight(self) -> Tensor:
        """The weight [N, O, I] that the layer was made of: a copy, if the layer keeps it in another form."""
        ...

    def __call__(self, x_TNI: Tensor, out_TNO: Tensor) -> None:
        """Compute `out_TNO`. In both tensors, only a head's numbers need to be neighbors."""
        ...


class TorchHeadLinear:
    """One matrix product for each head, all in one call."""

    def __init__(self, weight_NOI: Tensor) -> None:
        self.weight = weight_NOI
        self._weight_NIO = weight_NOI.transpose(1, 2)

    def __call__(self, x_TNI: Tensor, out_TNO: Tensor) -> None:
        out_TNO.copy_(torch.bmm(x_TNI.transpose(0, 1), self._weight_NIO).transpose(0, 1))


class EachHeadLinear:
    """A linear layer for each head, for batch invariance."""

    def __init__(self, heads: Sequence[Linear]) -> None:
        self._heads = heads

    @property
    def weight(self) -> Tensor:
        return torch.stack([cast(Tensor, head.weight) for head in self._heads])

    def __call__(self, x_TNI: Tensor, out_TNO: Tensor) -> None:
        for index, head in enumerate(self._heads):
            # a copy: a tile's rows are neighbors
            out_TNO[:, index] = head(x_TNI[:, index].contiguous())
