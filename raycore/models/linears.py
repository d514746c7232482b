"""The linear layers of a rank, made of the projections of a checkpoint. Does not import torch."""

from __future__ import annotations

__all__ = ["FusedLinear", "dense_linears"]

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from raycore.models.rows import Rows, divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec  # it has mixers, which have linear layers


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


def dense_linears(spec: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[FusedLinear, FusedLinear]:
    """Return the linear layers of a dense feed-forward part on one of `tp_size` ranks, as `MlpWeights` has them."""
    names, size, hidden = spec.names, spec.intermediate_size, whole("", spec.hidden_size)
    own = (divided(name, size, tp_rank, tp_size) for name in (names.gate, names.up))
    gate, up = stored_together(names.gate_up, *own)
    gate_up, down = (gate, up) if spec.is_gated else (up,), hidden._replace(name=names.down)

    def biased(parts: tuple[Rows, ...]) -> frozenset[str]:
        return frozenset(part.name for part in parts if spec.mlp_bias)

    return (
        FusedLinear("gate_up_FD", gate_up, hidden, "gate_up_bias", biased(gate_up), adapted="gate_up"),
        FusedLinear("down_DF", (down,), gate, "down_bias", biased((down,)), reads_divided=True, adapted="down"),
    )
