"""Mamba-2 as a layer's mixer of tokens: its projections, and the gate and the norm of its result.

The recurrence itself, with the convolution before it, is behind `Attention`, because it depends on sequences' states.
Shape suffixes: T tokens of the step, D hidden size, I inputs of the projections, or this rank's rows of one, C its
channels of the convolution, W its taps, N its value heads, O elements of all of them.
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
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.weights.layer_part_weights import LayerPartWeights


@dataclass
class Mamba2Weights(LayerPartWeights):
    """The weights of Mamba-2 in one layer on one rank."""

    in_ID: Tensor
    """The rows of x, of B, of C and of times, in this order. With a single group, every rank has those of B and C."""
    z_OD: Tensor
    """Those of the gate."""
    conv_CW: Tensor
    decay_N: Tensor
    """float32: the logarithm of how fast states decay."""
    bias_N: Tensor
    """float32: of times."""
    skip_N: Tensor
    """float32: what x is multiplied by before it is added to the result."""
    o_DO: Tensor
    norm_O: Tensor | None = None
    conv_bias_C: Tensor | None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        "in_ID": "mamba.in_proj.weight",
        "z_OD": "mamba.z_proj.weight",
        "conv_CW": "mamba.conv1d.weight",
        "conv_bias_C": "mamba.conv1d.bias",
        "decay_N": "mamba.A_log",
        "bias_N": "mamba.dt_bias",
        "skip_N": "mamba.D",
        "norm_O": "mamba.norm.weight",
        "o_DO": "mamba.out_proj.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("in_ID", "z_OD", "o_DO")


class Mamba2Mixer(Mixer):
    """One rank's Mamba-2 in one layer.

    Its result for a token is multiplied by SiLU of the gate z, and normalized after or before, one group of heads at a
    time, or not at all.
    """

    _PARTS: ClassVar[Mapping[str, str]] = {"_in": "in_proj", "_z": "z_proj", "o": "out_proj"}

    def __init__(self, place: PartPlace, weights: Mamba2Weights) -> None:
        spec, ranks, operations = place.spec, place.ranks, place.operations
        mixer: Mamba2Spec = place.mixer
        self._stage_index = place.stage_index
        names = ("conv_CW", "conv_bias_C", "decay_N", "bias_N", "skip_N", "norm_O")
        self._kept = {name: getattr(weights, name) for name in names}
        self.constants = MixerConstants(
            of_state={
                name: None if each is None else each.to(operations.device)
                for name, each in self._kept.items()
                if name != "norm_O"
            }
        )
        self._in = operations.linear(weights.in_ID)
        self._z = operations.linear(weights.z_OD)
        own = mixer.of_rank(ranks.size)
        self._norm: Norm | None = None
        if weights.norm_O is not None:
            # a single group is divided over the ranks
            shared = ranks if mixer.num_groups == 1 else TensorParallel()
            self._norm = operations.group_norm(weights.norm_O, own.num_groups, spec.rms_norm_eps, shared)
        self._is_normed_first = mixer.norm == "before_gate"
        self._z_multiplier, *multipliers = mixer.multipliers
        group = own.num_groups * own.k_dim
        self._in_multipliers_I = (
            None
            if set(multipliers) == {1.0}
            else torch.tensor(multipliers, dtype=weights.in_ID.dtype)
            .repeat_interleave(torch.tensor([own.num_values, group, group, own.num_v_heads]))
            .to(operations.device)
        )
        self._gate_and_mul = operations.gate_and_mul
        self.o = operations.linear(weights.o_DO, None, ranks)

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the input of `o` for the input of the projections. Updates the sequences' states."""
        in_TX, z_TO = self._in(x_TI), self._z(x_TI)
        if self._in_multipliers_I is not None:
            in_TX.mul_(self._in_multipliers_I)
        if self._z_multiplier != 1.0:
            z_TO.mul_(self._z_multiplier)
        values_TO = attention(self._stage_index, in_TX)
        if self._norm is not None and self._is_normed_first:
            values_TO = self._norm(values_TO)
        gated_TO = self._gate_and_mul("silu", torch.cat([z_TO, values_TO], 1))
        return gated_TO if self._norm is None or self._is_normed_first else self._norm(gated_TO)

    def weights(self) -> Mamba2Weights:
        """Return the weights that the mixer was made of."""
        return Mamba2Weights(in_ID=plain(self._in), z_OD=plain(self._z), o_DO=plain(self.o), **self._kept)
