"""Which weights a rank has had, by what outputs say of them. Kept by those who change them, not by the worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simulation.worker import model
from simulation.worker.numbers64 import Words


class WeightHistory:
    """See the module."""

    def __init__(self, checkpoint: str) -> None:
        self.now = model.weights_of(checkpoint)
        self.number = 0
        """Of the `WeightVersion` that outputs have now."""
        self._by_number: dict[int, list[Words]] = {0: [self.now]}

    def replaced(self, checkpoint: str, names: Sequence[str] = model.UNITS) -> Words:
        """The weights after these parts have come from a checkpoint."""
        new, other = self.now.copy(), model.weights_of(checkpoint)
        for name in names:
            new[model.UNITS.index(name)] = other[model.UNITS.index(name)]
        return new

    def with_part(self, name: str, number: int) -> Words:
        """The weights with another number for a part."""
        new = self.now.copy()
        new[model.UNITS.index(name)] = np.uint64(number)
        return new

    def begin(self, weights: Words) -> int:
        """Note that weights come now, of which outputs will say so a little later. Returns their number."""
        self._by_number[self.number].append(weights)
        self.now = weights
        self.number += 1
        self._by_number[self.number] = [weights]
        return self.number

    def of(self, number: int) -> list[Words]:
        """The weights from which a token may come that has this number."""
        return self._by_number[number]

    def all(self) -> list[Words]:
        """All weights that there have been."""
        return [each[0] for each in self._by_number.values()]
