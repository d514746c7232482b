"""The tensor-parallel ranks of an engine, as layers see them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raycore.parallel.collectives import Collectives

REDUCTION_PARTS = 4
"""With batch invariance: into how many parts that is divided which ranks sum, whatever their number."""


class TensorParallel:
    """Connects tensor-parallel rank `rank` to the other ranks of its engine. A single rank sends nothing."""

    def __init__(self, rank: int = 0, size: int = 1, collectives: Collectives | None = None) -> None:
        """`collectives`: None for a single rank."""
        self.rank = rank
        self.size = size
        self._collectives = collectives

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace `x` with the sum of all ranks' `x`, and return it."""
        return x if self._collectives is None else self._collectives.all_reduce_(x)

    def num_parts(self, num_elements: int) -> int:
        """Return how many of the `REDUCTION_PARTS` each rank has, if it has so many elements.

        0: the elements or the ranks can't be divided so.
        """
        size, rest = divmod(num_elements * self.size, REDUCTION_PARTS)
        # kernels for 16 bits take pairs of inputs
        return 0 if rest or size % 2 or REDUCTION_PARTS % self.size else REDUCTION_PARTS // self.size

    def sum_parts(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the sum of all ranks' parts. Its bits don't depend on how many ranks have the `REDUCTION_PARTS`.

        Parts are added in pairs, pairs in pairs, and so on.
        """
        return sum_in_pairs(self.all_gather(sum_in_pairs(parts)))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return all ranks' `x`, in rank order."""
        return [x] if self._collectives is None else self._collectives.all_gather(x)

    def all_gather_columns(self, x_RV: Tensor) -> Tensor:
        """Return the columns of all ranks side by side, [R, V · size]."""
        return x_RV if self._collectives is None else torch.cat(self.all_gather(x_RV), dim=1)

    def leave(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        if self._collectives is not None:
            self._collectives.close()


def sum_in_pairs(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of 1, 2, 4, ... tensors: that of the sums of both halves."""
    while len(parts) > 1:
        parts = [even + odd for even, odd in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]
