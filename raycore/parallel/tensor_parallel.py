"""The tensor-parallel ranks of an engine, as layers see them."""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.parallel.collectives import Collectives


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
