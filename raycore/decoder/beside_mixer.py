"""Attention and Mamba-2 beside each other as a layer's mixer of tokens.

Shape suffixes: T tokens of the step, D hidden size, I inputs of the projections, X the results of both mixers side by
side; and those of the mixers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.attention_mixer import AttentionMixer
from raycore.decoder.mamba2_mixer import Mamba2Mixer, Mamba2Weights
from raycore.decoder.mixer import Mixer
from raycore.layers.linear import Linear
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.beside import BesideSpec, attention_beside
from raycore.models.spec import ModelSpec
from raycore.parts.adapters.weights import LoraLinear
from raycore.state.recurrence import StateMemory
from raycore.weights.attention_weights import AttentionWeights
from raycore.weights.layer_part_weights import LayerPartWeights
from raycore.weights.weight import Weight


@dataclass
class BesideWeights(LayerPartWeights):
    """The weights of attention and of Mamba-2 in one layer on one rank."""

    attention: AttentionWeights
    mamba: Mamba2Weights

    NAMES: ClassVar[Mapping[str, str]] = {}
    MULTIPLIED: ClassVar[tuple[str, ...]] = ()

    def named(self) -> Iterator[tuple[str, Weight | None]]:
        yield from self.attention.named()
        yield from self.mamba.named()

    def num_weights(self, model: ModelSpec) -> int:
        return self.attention.num_weights(model) + self.mamba.num_weights(model)


class BesideMixer(Mixer):
    """One rank's attention and Mamba-2 in one layer, whose inputs and results are multiplied by constants."""

    _PARTS: ClassVar[Mapping[str, str]] = {"_attention": "self_attn", "_mamba": "mamba", "o": "o_proj"}

    def __init__(self, place: PartPlace, weights: BesideWeights) -> None:
        mixer: BesideSpec = place.mixer
        heads = attention_beside(place.spec)
        self._attention: AttentionMixer = replace(place, one=heads).make(heads, weights.attention)
        at_state = replace(place, one=mixer.mamba, stage_index=place.state_index)
        self._mamba: Mamba2Mixer = at_state.make(mixer.mamba, weights.mamba)
        self.constants = self._attention.constants._replace(of_state=self._mamba.constants.of_state)
        self._attention_input, of_attention = mixer.attention_multipliers
        self._mamba_input, of_mamba = mixer.mamba_multipliers
        attended = heads.heads(place.spec, place.ranks.size)
        sizes = [attended.num_heads * attended.head_dim, mixer.of_rank(place.ranks.size).num_values]
        self.o = _SummedLinears([(self._attention.o, of_attention), (self._mamba.o, of_mamba)], sizes)

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the inputs of both output projections side by side, [T, X], for the layer's input."""
        attended_TX = self._attention(_scaled(x_TI, self._attention_input), attention)
        values_TX = self._mamba(_scaled(x_TI, self._mamba_input), attention)
        return torch.cat([attended_TX, values_TX], 1)

    def weights(self) -> BesideWeights:
        return BesideWeights(self._attention.weights(), self._mamba.weights())

    @staticmethod
    def reorder_adapter_(linears: Mapping[str, LoraLinear], spec: ModelSpec, index: int, tp_size: int) -> None:
        AttentionMixer.reorder_adapter_(linears, spec, index, tp_size)


class BesideMemory(StateMemory):
    """That of both mixers: what attention has returned stays until Mamba-2 has, too."""

    def layer_bytes(self, *, is_native: bool) -> int:
        heads = attention_beside(self.spec).heads(self.spec, self.tp_size)
        kept = (
            2 * heads.num_heads * heads.head_dim + self.mixer.of_rank(self.tp_size).num_values + self.spec.hidden_size
        )
        return super().layer_bytes(is_native=is_native) + self.limits.num_tokens * kept * self.dtype.itemsize


def _scaled(x_TI: Tensor, multiplier: float) -> Tensor:
    return x_TI if multiplier == 1.0 else x_TI * multiplier


class _SummedLinears:
    """The sum of linear layers, each multiplied, that read one part of the input each. Implements `Linear`.

    Nobody asks for its weight: those of the parts are in the weights of both mixers.
    """

    weight = torch.empty(0, 0)
    bias = None

    def __init__(self, parts: list[tuple[Linear, float]], sizes: list[int]) -> None:
        """
        Args:
            parts: the layers, in the order of the inputs, and what their outputs are multiplied by.
            sizes: their numbers of inputs.
        """
        self._parts = parts
        self._sizes = sizes

    def __call__(self, x_TI: Tensor) -> Tensor:
        first, *others = self._outputs(x_TI)
        for out_TO in others:
            first += out_TO
        return first

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        """Return `residual_TO` plus the sum. Overwrites `residual_TO`."""
        return residual_TO.add_(self(x_TI))

    def _outputs(self, x_TI: Tensor) -> list[Tensor]:
        inputs = torch.split(x_TI, self._sizes, 1)
        return [
            linear(x.contiguous()).mul_(multiplier) for (linear, multiplier), x in zip(self._parts, inputs, strict=True)
        ]
