"""What computes the parts that a layer lacks: nothing.

Shape suffixes: T tokens of the step, D hidden size, which a layer without a mixer has as I and O, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.mixer import Mixer
from raycore.layers.feed_forward import FeedForward
from raycore.layers.part_place import PartPlace
from raycore.weights.layer_part_weights import LayerPartWeights


@dataclass
class NoWeights(LayerPartWeights):
    """The weights of a part that a layer lacks."""

    NAMES: ClassVar[Mapping[str, str]] = {}
    MULTIPLIED: ClassVar[tuple[str, ...]] = ()


class NullFeedForward(FeedForward):
    """Adds nothing."""

    def __init__(self, place: PartPlace, weights: NoWeights) -> None:
        self._weights = weights

    def apply(self, x_TD: Tensor) -> Tensor:
        return torch.zeros_like(x_TD)

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return residual_TD

    def weights(self) -> NoWeights:
        return self._weights


class _NullLinear:
    """A linear layer that returns zeros. Implements `Linear`."""

    weight = torch.empty(0, 0)
    bias = None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return torch.zeros_like(x_TI)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Return `residual_TO`."""
        return residual_TO


class NullMixer(Mixer):
    """Mixes nothing: the input of its projection is the layer's own."""

    _PARTS: ClassVar[Mapping[str, str]] = {}

    def __init__(self, place: PartPlace, weights: NoWeights) -> None:
        self._weights = weights
        self.constants = MixerConstants()
        self.o = _NullLinear()

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        return x_TI

    def weights(self) -> NoWeights:
        return self._weights
