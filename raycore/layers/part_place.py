"""Where a part of a layer is, its mixer or its feed-forward part, and what it is made with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from raycore.class_paths import import_path
from raycore.layers.handed import Handed
from raycore.layers.linear import Linear
from raycore.layers.operations import Operations
from raycore.models.layer_part import LayerPart
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import ExpertRanks
from raycore.weights.layer_part_weights import LayerPartWeights

Adapt = Callable[[Linear, str, TensorParallel | None], Linear]
"""Returns a linear layer with what adapters add to it. The ranks are those over which its input is split."""


def unadapted(linear: Linear, name: str, ranks: TensorParallel | None) -> Linear:
    """Return a linear layer that no adapter changes."""
    return linear


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where a part is, and what it is made with."""

    spec: ModelSpec
    index: int
    """The layer's index among those of the model."""
    stage_index: int
    """The layer's index among those of the stage."""
    ranks: TensorParallel
    experts: ExpertRanks
    """The ranks that share experts."""
    operations: Operations
    adapt: Adapt = unadapted
    handed: Handed = field(default_factory=Handed)
    """What the layers of the network hand to later ones."""
    one: LayerPart | None = None
    """The part that is made, if the layer has two mixers. None: it has one."""

    @property
    def mixer(self) -> Any:
        """The spec of the layer's mixer that is made."""
        return self.spec.mixers[self.index] if self.one is None else self.one

    @property
    def state_index(self) -> int:
        """The index of the layer's state for `Attention`, if the layer has attention, too."""
        return self.spec.num_layers + self.stage_index

    def make(self, part: LayerPart, weights: LayerPartWeights) -> Any:
        """Return what computes a part of the layer. `weights`: of the class that `LayerPart.weights_class` names."""
        return import_path(part.computed_by)(self, weights)
