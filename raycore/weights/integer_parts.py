"""Weights of layers that are computed together, whose integers have several forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from raycore.weights.integer_weight import IntegerWeight


@dataclass
class IntegerParts:
    """The weight [O, I] of a linear layer whose rows are those of several weights, one after the other."""

    parts: list[IntegerWeight]

    def __getitem__(self, rows: slice) -> IntegerWeight:
        """Return some of the rows of one part. They share its memory."""
        start, stop, _ = rows.indices(self.shape[0])
        for own, part in self.placed():
            if own.start <= start and stop <= own.stop:
                return part[start - own.start : stop - own.start]
        raise IndexError(f"rows {start} to {stop} aren't in one of the parts {[own for own, _ in self.placed()]}")

    def placed(self) -> Iterator[tuple[slice, IntegerWeight]]:
        """Yield the parts, with which of the rows they have."""
        start = 0
        for part in self.parts:
            yield slice(start, start + part.shape[0]), part
            start += part.shape[0]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def shape(self) -> torch.Size:
        """Number of outputs and of inputs."""
        return torch.Size((sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]))

    def numel(self) -> int:
        """Return the number of integers."""
        return self.shape.numel()

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return the numbers, [O, I]. They are computed in float32 and rounded once."""
        return torch.cat([part.dequantize(dtype) for part in self.parts])
