"""A short convolution as a layer's mixer of tokens: its projections, and the gates of its input and its result.

The convolution itself is behind `Attention`, because it depends on sequences' earlier inputs. Shape suffixes: T tokens
of the step, D hidden size, I inputs of the input projection, or this rank's rows of it, C its channels of the
convolution, which are O inputs of the output projection, W taps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.mixer import Mixer
from raycore.layers.part_place import PartPlace
from raycore.weights.layer_part_weights import LayerPartWeights
from raycore.weights.weight import Weight


@dataclass
class ShortConvWeights(LayerPartWeights):
    """The weights of a short convolution in one layer on one rank."""

    in_ID: Weight
    """The rows of the gate of the input, of the gate of the result, and of what is convolved, in this order."""
    conv_CW: Tensor
    o_DO: Weight
    in_bias_I: Tensor | None = None
    conv_bias_C: Tensor | None = None
    o_bias: Tensor | None = None
    """None on ranks other than tp_rank 0, because the sum over ranks must include the bias only once."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "in_ID": "conv.in_proj.weight",
        "in_bias_I": "conv.in_proj.bias",
        "conv_CW": "conv.conv.weight",
        "conv_bias_C": "conv.conv.bias",
        "o_DO": "conv.out_proj.weight",
        "o_bias": "conv.out_proj.bias",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("in_ID", "o_DO")


class ShortConvMixer(Mixer):
    """One rank's short convolution in one layer.

    What is convolved is multiplied by a gate before, and the result by another one. Gates are linear functions of the
    layer's input, without an activation.
    """

    _PARTS: ClassVar[Mapping[str, str]] = {"_in": "in_proj", "o": "out_proj"}

    def __init__(self, place: PartPlace, weights: ShortConvWeights) -> None:
        ranks, operations = place.ranks, place.operations
        self._stage_index = place.stage_index
        self._kept = {name: getattr(weights, name) for name in ("conv_CW", "conv_bias_C")}
        self.constants = MixerConstants(
            of_state={name: None if each is None else each.to(operations.device) for name, each in self._kept.items()}
        )
        self._in = place.adapt(operations.linear(weights.in_ID, weights.in_bias_I), "in", None)
        self.o = place.adapt(operations.linear(weights.o_DO, weights.o_bias, ranks), "o", ranks)

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the input of `o` for the input of the projection. Updates the sequences' states."""
        before_TC, after_TC, inputs_TC = self._in(x_TI).chunk(3, dim=1)
        return attention(self._stage_index, before_TC * inputs_TC).mul_(after_TC)

    def weights(self) -> ShortConvWeights:
        """Return the weights that the mixer was made of."""
        return ShortConvWeights(
            in_ID=self._in.weight, in_bias_I=self._in.bias, o_DO=self.o.weight, o_bias=self.o.bias, **self._kept
        )
