"""Kimi's delta attention as a layer's mixer of tokens: its projections, and the norm and the gate of its result.

The rule itself, with the convolution before it, is behind `Attention`, because it depends on sequences' states. Shape
suffixes: T tokens of the step, D hidden size, I this rank's rows of a projection of it, C its channels of the
convolution, W its taps, N its heads, K elements of one, which are as many as H, O those of all, X anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.mixer import Mixer, plain
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.kda import KdaSpec
from raycore.weights.layer_part_weights import LayerPartWeights


@dataclass
class KdaWeights(LayerPartWeights):
    """The weights of Kimi's delta attention in one layer on one rank."""

    qkv_ID: Tensor
    """The rows of queries, of keys and of values, one after the other."""
    vectors_ID: Tensor
    """Those of b, and of the vectors that decays and gates are made of, which every rank has. Or, with
    `KdaSpec.is_direct`, those of this rank's decays and gates."""
    conv_CW: Tensor
    decay_N: Tensor
    """float32: the logarithm of how fast states decay."""
    bias_O: Tensor
    """float32: of decays."""
    norm_H: Tensor
    o_DO: Tensor
    f_OK: Tensor | None = None
    """Makes decays of their vector."""
    g_OK: Tensor | None = None
    """Makes gates of theirs."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "qkv_ID": "self_attn.qkv_proj.weight",
        "vectors_ID": "self_attn.b_f_g_proj.weight",
        "f_OK": "self_attn.f_b_proj.weight",
        "g_OK": "self_attn.g_b_proj.weight",
        "conv_CW": "self_attn.conv1d.weight",
        "decay_N": "self_attn.A_log",
        "bias_O": "self_attn.dt_bias",
        "norm_H": "self_attn.o_norm.weight",
        "o_DO": "self_attn.o_proj.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("qkv_ID", "vectors_ID", "f_OK", "g_OK", "o_DO")


class KdaMixer(Mixer):
    """One rank's Kimi delta attention in one layer.

    Its result for a token is normalized, one head at a time, and multiplied by the sigmoid of the gate.
    """

    _PARTS: ClassVar[Mapping[str, str]] = {
        "_qkv": "qkv_proj",
        "_vectors": "b_f_g_proj",
        "_f": "f_b_proj",
        "_g": "g_b_proj",
        "o": "o_proj",
    }

    def __init__(self, place: PartPlace, weights: KdaWeights) -> None:
        spec, ranks, operations, adapt = place.spec, place.ranks, place.operations, place.adapt
        own: KdaSpec = place.mixer.of_rank(ranks.size)
        self._stage_index = place.stage_index
        size = own.num_values if own.is_direct else own.k_dim
        self._sizes = [own.num_v_heads, size, size]
        self._kept = {name: getattr(weights, name) for name in ("conv_CW", "decay_N", "bias_O", "norm_H")}
        of_state = {name: getattr(weights, name).to(operations.device) for name in ("conv_CW", "decay_N", "bias_O")}
        self.constants = MixerConstants(of_state=of_state)
        self._qkv = adapt(operations.linear(weights.qkv_ID), "qkv", None)
        self._vectors = adapt(operations.linear(weights.vectors_ID), "b_f_g", None)
        self._f = None if weights.f_OK is None else adapt(operations.linear(weights.f_OK), "f_b", None)
        self._g = None if weights.g_OK is None else adapt(operations.linear(weights.g_OK), "g_b", None)
        self._norm = operations.rms_norm(weights.norm_H, spec.rms_norm_eps)
        self._sigmoid = operations.sigmoid
        self.o = adapt(operations.linear(weights.o_DO, None, ranks), "o", ranks)

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the input of `o` for the input of the projections. Updates the sequences' states."""
        b_TN, f_TX, g_TX = (each.contiguous() for each in torch.split(self._vectors(x_TI), self._sizes, 1))
        f_TO = f_TX if self._f is None else self._f(f_TX)
        values_TO = attention(self._stage_index, torch.cat([self._qkv(x_TI), b_TN, f_TO], 1))
        normed_TO = self._norm(values_TO.view(-1, len(self._kept["norm_H"]))).view(values_TO.shape)
        return normed_TO.mul_(self._sigmoid(g_TX if self._g is None else self._g(g_TX)))

    def weights(self) -> KdaWeights:
        """Return the weights that the mixer was made of."""
        return KdaWeights(
            qkv_ID=plain(self._qkv),
            vectors_ID=plain(self._vectors),
            f_OK=None if self._f is None else plain(self._f),
            g_OK=None if self._g is None else plain(self._g),
            o_DO=plain(self.o),
            **self._kept,
        )
