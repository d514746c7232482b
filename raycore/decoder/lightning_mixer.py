"""Lightning attention as a layer's mixer of tokens: its projections, and the norm and the gate of its result.

The recurrence itself is behind `Attention`, because it depends on sequences' states. Shape suffixes: T tokens of the
step, D hidden size, I this rank's rows of queries, keys and values, N its heads, H elements of one, O those of all, C
channels, W taps of a convolution, X anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.mixer import Mixer, plain
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.lightning import LightningSpec
from raycore.weights.layer_part_weights import LayerPartWeights

_NORM_EPS = 1e-6
"""config.json doesn't say it."""


@dataclass
class LightningWeights(LayerPartWeights):
    """The weights of lightning attention in one layer on one rank."""

    qkv_ID: Tensor
    """The rows of one head after the other: of its query, its key and its value."""
    gate_OD: Tensor
    norm_O: Tensor
    o_DO: Tensor

    NAMES: ClassVar[Mapping[str, str]] = {
        "qkv_ID": "self_attn.qkv_proj.weight",
        "gate_OD": "self_attn.output_gate.weight",
        "norm_O": "self_attn.norm.weight",
        "o_DO": "self_attn.out_proj.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("qkv_ID", "gate_OD", "o_DO")


class LightningMixer(Mixer):
    """One rank's lightning attention in one layer.

    Its result for a token is normalized over all heads, and multiplied by the sigmoid of a gate.
    """

    _PARTS: ClassVar[Mapping[str, str]] = {"_qkv": "qkv_proj", "_gate": "output_gate", "o": "out_proj"}

    def __init__(self, place: PartPlace, weights: LightningWeights) -> None:
        spec, ranks, operations, adapt = place.spec, place.ranks, place.operations, place.adapt
        mixer: LightningSpec = place.mixer
        self._stage_index = place.stage_index
        self._num_heads = mixer.num_v_heads // ranks.size
        self._norm_O = weights.norm_O
        first = ranks.rank * self._num_heads
        decays = [_decay(mixer, head, place.index, spec.num_layers) for head in range(first, first + self._num_heads)]
        self.constants = MixerConstants(of_state=_constants(mixer, decays, weights.qkv_ID.dtype, operations.device))
        self._qkv = adapt(operations.linear(weights.qkv_ID), "qkv", None)
        self._gate = adapt(operations.linear(weights.gate_OD), "output_gate", None)
        self._norm = operations.group_norm(weights.norm_O, 1, _NORM_EPS, ranks)
        self._sigmoid = operations.sigmoid
        self.o = adapt(operations.linear(weights.o_DO, None, ranks), "o", ranks)

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the input of `o` for the input of the projections. Updates the sequences' states."""
        values_TO = attention(self._stage_index, self._inputs(x_TI))
        return self._norm(values_TO).mul_(self._sigmoid(self._gate(x_TI)))

    def weights(self) -> LightningWeights:
        """Return the weights that the mixer was made of."""
        return LightningWeights(plain(self._qkv), plain(self._gate), self._norm_O, plain(self.o))

    def _inputs(self, x_TI: Tensor) -> Tensor:
        """Return what Mamba-2 gets: values, keys, queries, and times, which are limited to 1, whatever they are."""
        qkv_TN3H = self._qkv(x_TI).view(len(x_TI), self._num_heads, 3, -1)
        times_TN = x_TI.new_zeros(len(x_TI), self._num_heads)
        return torch.cat([*(qkv_TN3H[:, :, part].flatten(1) for part in (2, 1, 0)), times_TN], 1)


def _decay(mixer: LightningSpec, head: int, layer: int, num_layers: int) -> float:
    """Return by which power of e states of a head decay with a token, times -1.

    Source: Lightning Attention-2 (https://arxiv.org/abs/2401.04658), whose later layers decay less.
    """
    return 2 ** (-8 * (head + 1) / mixer.num_v_heads) * (1 - layer / (num_layers - 1 + 1e-5) + 1e-5)


def _constants(
    mixer: LightningSpec, decays: list[float], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor | None]:
    """Return what makes Mamba-2 compute lightning attention with these decays."""
    num_heads = len(decays)
    conv_CW = torch.zeros(3 * num_heads * mixer.v_dim, mixer.conv_size, dtype=dtype, device=device)
    conv_CW[:, -1] = 1.0
    return {
        "conv_CW": conv_CW,
        "conv_bias_C": None,
        "decay_N": torch.tensor([math.log(each) for each in decays], device=device),
        "bias_N": torch.zeros(num_heads, device=device),
        "skip_N": torch.zeros(num_heads, device=device),
    }
