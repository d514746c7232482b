"""The weights of a part of a layer on one rank: what each class of them has, and those of a dense feed-forward part.

A `LayerPart` declares which tensors there are and which class has them. Shape suffixes: D hidden size, F this rank's
rows of the gate, then of up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from raycore.models.feed_forward import HasTensor
from raycore.models.spec import ModelSpec
from raycore.weights.share import WeightShare
from raycore.weights.weight import Fill, Weight


class LayerPartWeights:
    """What each class of such weights has. Its fields are those that the linear layers and vectors of its `LayerPart`
    name. They are None where a model has no such tensor."""

    NAMES: ClassVar[Mapping[str, str]]
    """Within its layer, the name of each field in the files of a rank's share, in order."""
    MULTIPLIED: ClassVar[tuple[str, ...]]
    """The fields that a token's inputs are multiplied with."""

    @staticmethod
    def other_fields(part: Any, prefix: str, share: WeightShare, has_tensor: HasTensor, fill: Fill) -> dict[str, Any]:
        """Return what a layer has besides linear layers and vectors, and have it filled, now or later.

        Args:
            prefix: of the tensors' names.
            has_tensor: whether the checkpoint has a tensor of this name.
        """
        return {}

    def named(self) -> Iterator[tuple[str, Weight | None]]:
        """Yield all fields, by their names in the files of a rank's share."""
        for field, name in self.NAMES.items():
            yield name, getattr(self, field)

    def num_weights(self, model: ModelSpec) -> int:
        """Return the number of multiplications for one token in the linear layers."""
        weights: list[Weight | None] = [getattr(self, field) for field in self.MULTIPLIED]
        return sum(each.numel() for each in weights if each is not None)


@dataclass
class MlpWeights(LayerPartWeights):
    """The weights of one dense feed-forward part on one rank."""

    gate_up_FD: Weight
    """This rank's gate rows, then its up rows. Without a gate, only the latter."""
    down_DF: Weight
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    """None on ranks other than tp_rank 0, because the sum over ranks must include the bias only once."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "gate_up_FD": "mlp.gate_up_proj.weight",
        "gate_up_bias": "mlp.gate_up_proj.bias",
        "down_DF": "mlp.down_proj.weight",
        "down_bias": "mlp.down_proj.bias",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("gate_up_FD", "down_DF")


@dataclass
class XieluWeights(MlpWeights):
    """The same with an activation that has weights."""

    alphas_2: Tensor | None = None
    """What `softplus` makes the factors of positive and of negative inputs, without `beta` of the latter."""
    constants_2: Tensor | None = None
    """`beta` and `eps` of the activation. None: those that all models have."""

    NAMES: ClassVar[Mapping[str, str]] = {
        **MlpWeights.NAMES,
        "alphas_2": "mlp.act_fn.alphas",
        "constants_2": "mlp.act_fn.constants",
    }
