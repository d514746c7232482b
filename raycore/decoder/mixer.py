"""The interface of what mixes the tokens of a sequence in a layer, such as attention."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.class_paths import import_path
from raycore.layers.linear import Linear
from raycore.models.spec import ModelSpec
from raycore.parts.adapters.weights import LoraLinear, LoraWeights
from raycore.weights.layer_part_weights import LayerPartWeights


class Mixer(ABC):
    """One rank's mixer in one layer. What depends on positions and on the cache is in `Attention`.

    `MixerSpec.computed_by` names the class, which gets a `PartPlace` and the weights.
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
    def weights(self) -> LayerPartWeights:
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


def reorder_adapter_(adapter: LoraWeights, spec: ModelSpec, tp_size: int, first_layer: int = 0) -> None:
    """Bring what an adapter adds in the order in which mixers have their outputs. They share its memory.

    `first_layer`: the index in the model of the adapter's first layer.
    """
    for index, linears in enumerate(adapter.layers, start=first_layer):
        import_path(spec.mixers[index].computed_by).reorder_adapter_(linears, spec, index, tp_size)
