"""The interface of what mixes the tokens of a sequence in a layer, such as attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.class_paths import import_path
from raycore.layers.linear import Linear
from raycore.layers.operations import Operations
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.weights import LoraLinear, LoraWeights
from raycore.weights.mixer_weights import MixerWeights

Adapt = Callable[[Linear, str, TensorParallel | None], Linear]
"""Returns a linear layer with what adapters add to it. The ranks are those over which its input is split."""


@dataclass(frozen=True, slots=True)
class MixerPlace:
    """Where a mixer is, and what it is made with."""

    spec: ModelSpec
    index: int
    """The layer's index among those of the model."""
    stage_index: int
    """The layer's index among those of the stage."""
    ranks: TensorParallel
    operations: Operations
    adapt: Adapt

    @property
    def mixer(self) -> Any:
        """The spec of the layer's mixer."""
        return self.spec.mixers[self.index]


class Mixer(ABC):
    """One rank's mixer in one layer. What depends on positions and on the cache is in `Attention`.

    `MixerSpec.computed_by` names the class, which gets the arguments of `make_mixer`.
    """

    o: Linear
    """The projection of the output, which the layer calls, because it may add the result to the hidden states."""
    constants: MixerConstants

    _PARTS: ClassVar[Mapping[str, str]]
    """The names of the parts in profiles, by attribute. Some mixers lack some of them."""

    @property
    def parts(self) -> Mapping[str, str]:
        """The names of the parts in profiles, by attribute."""
        return {name: part for name, part in self._PARTS.items() if getattr(self, name) is not None}

    @abstractmethod
    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the input of `o`, for the layer's input, and store what later tokens need of it."""

    @abstractmethod
    def weights(self) -> MixerWeights:
        """Return the weights that the mixer was made of. Most are copies."""

    @staticmethod  # noqa: B027  # most outputs are in the checkpoint's order
    def reorder_adapter_(linears: Mapping[str, LoraLinear], spec: ModelSpec, index: int, tp_size: int) -> None:
        """Bring what an adapter adds to linear layers in the order in which the mixer has their outputs, in place.

        `index`: the layer's index among those of the model.
        """


def plain(linear: Linear) -> Tensor:
    """Return the weight of a linear layer with `FusedLinear.is_plain`."""
    assert isinstance(linear.weight, Tensor), "such weights aren't quantized"
    return linear.weight


def make_mixer(place: MixerPlace, weights: MixerWeights) -> Mixer:
    """Return a layer's mixer. `weights`: of the class that `MixerSpec.weights_class` names."""
    return _mixer_class(place.spec, place.index)(place, weights)


def reorder_adapter_(adapter: LoraWeights, spec: ModelSpec, tp_size: int, first_layer: int = 0) -> None:
    """Bring what an adapter adds in the order in which mixers have their outputs. They share its memory.

    `first_layer`: the index in the model of the adapter's first layer.
    """
    for index, linears in enumerate(adapter.layers, start=first_layer):
        _mixer_class(spec, index).reorder_adapter_(linears, spec, index, tp_size)


def _mixer_class(spec: ModelSpec, index: int) -> Any:
    return import_path(spec.mixers[index].computed_by)
