"""Mamba-1 as a layer's mixer of tokens: its projections, and the gate of its result.

The recurrence itself, with the convolution before it, is behind `Attention`, because it depends on sequences' states.
It calls the projections that are between the two. Shape suffixes: T tokens of the step, D hidden size, I inputs of the
projections, or this rank's rows of one, C its channels, W taps of the convolution, K numbers of a channel's state, M
numbers that times are made of, X these and those of B and C.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.mixer import Mixer, plain
from raycore.layers.operations import Norm
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.mamba1 import Mamba1Spec
from raycore.weights.layer_part_weights import LayerPartWeights

_NORMS = ("dt_norm_M", "b_norm_K", "c_norm_K")


@dataclass
class Mamba1Weights(LayerPartWeights):
    """The weights of Mamba-1 in one layer on one rank."""

    in_ID: Tensor
    """The rows of x, then of the gate."""
    x_XC: Tensor
    """The rows of what times are made of, of B and of C, in this order."""
    dt_CM: Tensor
    """Makes times."""
    conv_CW: Tensor
    decay_CK: Tensor
    """float32: the logarithm of how fast states decay."""
    bias_C: Tensor
    """float32: of times."""
    skip_C: Tensor
    """float32: what x is multiplied by before it is added to the result."""
    o_DC: Tensor
    conv_bias_C: Tensor | None = None
    in_bias_I: Tensor | None = None
    o_bias: Tensor | None = None
    """None on ranks other than tp_rank 0, because the sum over ranks must include the bias only once."""
    dt_norm_M: Tensor | None = None
    b_norm_K: Tensor | None = None
    c_norm_K: Tensor | None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        "in_ID": "mamba.in_proj.weight",
        "in_bias_I": "mamba.in_proj.bias",
        "conv_CW": "mamba.conv1d.weight",
        "conv_bias_C": "mamba.conv1d.bias",
        "x_XC": "mamba.x_proj.weight",
        "dt_norm_M": "mamba.dt_layernorm.weight",
        "b_norm_K": "mamba.b_layernorm.weight",
        "c_norm_K": "mamba.c_layernorm.weight",
        "dt_CM": "mamba.dt_proj.weight",
        "bias_C": "mamba.dt_proj.bias",
        "decay_CK": "mamba.A_log",
        "skip_C": "mamba.D",
        "o_DC": "mamba.out_proj.weight",
        "o_bias": "mamba.out_proj.bias",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("in_ID", "x_XC", "dt_CM", "o_DC")


class Mamba1Mixer(Mixer):
    """One rank's Mamba-1 in one layer. Its result for a token is multiplied by SiLU of the gate."""

    _PARTS: ClassVar[Mapping[str, str]] = {"_in": "in_proj", "_x": "x_proj", "_dt": "dt_proj", "o": "out_proj"}

    def __init__(self, place: PartPlace, weights: Mamba1Weights) -> None:
        ranks, operations = place.ranks, place.operations
        mixer: Mamba1Spec = place.mixer
        self._stage_index = place.stage_index
        self._sizes = mixer.selected_sizes
        names = ("conv_CW", "conv_bias_C", "decay_CK", "bias_C", "skip_C", *_NORMS)
        self._kept = {name: getattr(weights, name) for name in names}
        self._in = operations.linear(weights.in_ID, weights.in_bias_I)
        self._x = operations.linear(weights.x_XC, None, ranks)
        self._dt = operations.linear(weights.dt_CM)
        self.o = operations.linear(weights.o_DC, weights.o_bias, ranks)
        self._gate_and_mul = operations.gate_and_mul
        self._norms: list[Norm] = []
        if mixer.norms is not None:
            own = [getattr(weights, name) for name in _NORMS]
            ones = (torch.ones(size, dtype=weights.x_XC.dtype) for size in self._sizes)
            of_norms = ones if mixer.norms == "bare" else own
            self._norms = [operations.rms_norm(each, mixer.norm_eps) for each in of_norms]
        given = ("conv_CW", "conv_bias_C", "bias_C", "skip_C")
        of_state = {name: None if (own := self._kept[name]) is None else own.to(operations.device) for name in given}
        rates_KC = weights.decay_CK.to(operations.device).exp().neg_().t().contiguous()
        self.constants = MixerConstants(of_state={**of_state, "rates_KC": rates_KC, "select": self._select})

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the input of `o` for the input of the projections. Updates the sequences' states."""
        inputs_TC, gate_TC = self._in(x_TI).chunk(2, 1)
        values_TC = attention(self._stage_index, inputs_TC.contiguous())
        return self._gate_and_mul("silu", torch.cat([gate_TC, values_TC], 1))

    def weights(self) -> Mamba1Weights:
        """Return the weights that the mixer was made of."""
        return Mamba1Weights(
            in_ID=plain(self._in),
            in_bias_I=self._in.bias,
            x_XC=plain(self._x),
            dt_CM=plain(self._dt),
            o_DC=plain(self.o),
            o_bias=self.o.bias,
            **self._kept,
        )

    def _select(self, y_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return times, B and C. See `Mamba1Layer.select`."""
        made = [each.contiguous() for each in torch.split(self._x(y_TC), self._sizes, 1)]
        if self._norms:
            made = [norm(each) for norm, each in zip(self._norms, made, strict=True)]
        made_of_TM, b_TK, c_TK = made
        return self._dt(made_of_TM), b_TK, c_TK
