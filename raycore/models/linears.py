"""The linear layers of a rank, made of the projections of a checkpoint. Does not import torch."""

from __future__ import annotations

__all__ = ["FusedLinear"]

from collections.abc import Iterator
from typing import NamedTuple

from raycore.models.rows import Rows


class FusedLinear(NamedTuple):
    """A linear layer on one rank: the rows of some projections of the checkpoint, one below the other."""

    field: str
    """Of the weights' class: its weight."""
    outputs: tuple[Rows, ...]
    """The rank's rows of each projection, in order."""
    inputs: Rows
    """Those that the rank reads."""
    bias_field: str = ""
    """Of the weights' class: its bias. Only needed if there is one."""
    biased: frozenset[str] = frozenset()
    """The projections that have a bias, by name. Others get zeros if one of them has."""
    reads_divided: bool = False
    """Whether ranks divide the inputs, and add up their results. So only the first rank has the bias."""
    adapted: str = ""
    """What it is called where adapters change it, such as `qkv`. Then it has at most 3 projections, as many as kernels
    read. Empty: they can't."""
    is_plain: bool = False
    """Whether the weight is always kept in numbers of the model's data type, whatever the checkpoint stores."""

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of the tensors in the checkpoint, some of them more than once."""
        for part in self.outputs:
            yield f"{part.name}.weight", (part.num_stored, self.inputs.total)
            if part.name in self.biased:
                yield f"{part.name}.bias", (part.num_stored,)

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of outputs and inputs of the checkpoint's projections, by name."""
        return {part.name: (part.num_stored, self.inputs.total) for part in self.outputs}
