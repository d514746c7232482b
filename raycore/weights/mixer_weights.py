"""The weights of what mixes the tokens of a sequence in a layer, on one rank, and how those that exist are allocated.

A `MixerSpec` declares which tensors there are and which class has them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from raycore.weights.weight import Weight


class MixerWeights:
    """What each class of such weights has. Its fields are those that the linear layers and vectors of its `MixerSpec`
    name. They are None where a model has no such tensor."""

    NAMES: ClassVar[Mapping[str, str]]
    """Within its layer, the name of each field in the files of a rank's share, in order."""
    MULTIPLIED: ClassVar[tuple[str, ...]]
    """The fields that a token's inputs are multiplied with."""

    def named(self) -> Iterator[tuple[str, Weight | None]]:
        """Yield all fields, by their names in the files of a rank's share."""
        for field, name in self.NAMES.items():
            yield name, getattr(self, field)

    @property
    def num_weights(self) -> int:
        """Number of multiplications for one token in the linear layers."""
        weights: list[Weight | None] = [getattr(self, field) for field in self.MULTIPLIED]
        return sum(each.numel() for each in weights if each is not None)
