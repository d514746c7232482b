"""The gated delta rule as a layer's mixer of tokens: its projections, and the norm and the gate of its result.

The rule itself, with the convolution before it, is behind `Attention`, because it depends on sequences' states. Shape
suffixes: T tokens of the step, D hidden size, I inputs of the projections, or this rank's rows of one, C its channels
of the convolution, W its taps, N its value heads, H elements of one, O those of all, X anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.mixer import Mixer, plain
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.delta import DeltaSpec
from raycore.weights.layer_part_weights import LayerPartWeights


@dataclass
class DeltaWeights(LayerPartWeights):
    """The weights of the gated delta rule in one layer on one rank."""

    qkvz_ID: Tensor
    """The rows of queries, keys, values and the gate z: of one key head after the other if `DeltaSpec.is_interleaved`,
    otherwise of all heads one after the other."""
    ba_ID: Tensor
    """Those of b and a, in the same order."""
    conv_CW: Tensor
    decay_N: Tensor
    """float32: the logarithm of how fast states decay."""
    bias_N: Tensor
    """float32: of a."""
    norm_H: Tensor
    o_DO: Tensor

    NAMES: ClassVar[Mapping[str, str]] = {
        "qkvz_ID": "linear_attn.in_proj_qkvz.weight",
        "ba_ID": "linear_attn.in_proj_ba.weight",
        "conv_CW": "linear_attn.conv1d.weight",
        "decay_N": "linear_attn.A_log",
        "bias_N": "linear_attn.dt_bias",
        "norm_H": "linear_attn.norm.weight",
        "o_DO": "linear_attn.out_proj.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("qkvz_ID", "ba_ID", "o_DO")


class DeltaMixer(Mixer):
    """One rank's gated delta rule in one layer.

    Its result for a token is normalized, one value head at a time, and multiplied by SiLU of the gate z.
    """

    _PARTS: ClassVar[Mapping[str, str]] = {"_in": "in_proj", "_z": "z_proj", "o": "out_proj"}

    def __init__(self, place: PartPlace, weights: DeltaWeights) -> None:
        spec, ranks, operations = place.spec, place.ranks, place.operations
        own: DeltaSpec = place.mixer.of_rank(ranks.size)
        eps = spec.rms_norm_eps if own.norm_eps is None else own.norm_eps
        self._stage_index = place.stage_index
        self._kept = {name: getattr(weights, name) for name in ("conv_CW", "decay_N", "bias_N", "norm_H")}
        of_state = {name: getattr(weights, name).to(operations.device) for name in ("conv_CW", "decay_N", "bias_N")}
        self.constants = MixerConstants(of_state=of_state)
        self._order = _RowOrder.of(own, weights.qkvz_ID.device)
        rows_XI = torch.cat([weights.qkvz_ID, weights.ba_ID])
        self._in = operations.linear(rows_XI.index_select(0, self._order.inputs))
        self._z = operations.linear(rows_XI.index_select(0, self._order.gates))
        self._head_dim = len(weights.norm_H)
        self._norm = operations.rms_norm(weights.norm_H, eps)
        self._gate_and_mul = operations.gate_and_mul
        self.o = operations.linear(weights.o_DO, None, ranks)

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the input of `o` for the input of the projections. Updates the sequences' states."""
        values_TX = attention(self._stage_index, self._in(x_TI))
        normed_TX = self._norm(values_TX.view(-1, self._head_dim)).view(values_TX.shape)
        return self._gate_and_mul("silu", torch.cat([self._z(x_TI), normed_TX], 1))

    def weights(self) -> DeltaWeights:
        """Return the weights that the mixer was made of."""
        in_XI, z_XI, order = plain(self._in), plain(self._z), self._order
        rows_XI = torch.empty(len(in_XI) + len(z_XI), in_XI.shape[1], dtype=in_XI.dtype, device=in_XI.device)
        rows_XI[order.inputs], rows_XI[order.gates] = in_XI, z_XI
        qkvz_ID, ba_ID = rows_XI[: order.num_qkvz], rows_XI[order.num_qkvz :]
        return DeltaWeights(qkvz_ID=qkvz_ID, ba_ID=ba_ID, o_DO=plain(self.o), **self._kept)


class _RowOrder(NamedTuple):
    """Where the rows of a rank's projections are among those of `DeltaWeights`, `qkvz_ID` before `ba_ID`."""

    inputs: Tensor
    """Those that `DeltaKernels` read: of queries, keys, values, b and a."""
    gates: Tensor
    """Those of z."""
    num_qkvz: int

    @classmethod
    def of(cls, state: DeltaSpec, device: torch.device) -> _RowOrder:
        """Return the order on a rank with the sizes `state`."""
        group = state.num_v_heads // state.num_k_heads
        qkvz, ba = [state.k_dim, state.k_dim, group * state.v_dim, group * state.v_dim], [group, group]
        if not state.is_interleaved:
            qkvz, ba = ([size * state.num_k_heads for size in sizes] for sizes in (qkvz, ba))
        num_qkvz = state.num_channels + state.num_values
        (q, k, v, z), (b, a) = _rows(qkvz, 0, num_qkvz), _rows(ba, num_qkvz, 2 * state.num_v_heads)
        return cls(torch.cat([q, k, v, b, a]).to(device), z.to(device), num_qkvz)


def _rows(sizes: list[int], first: int, num_rows: int) -> list[Tensor]:
    """Return, for each of the parts that `num_rows` rows from `first` on consist of, again and again, its rows."""
    rows = torch.arange(first, first + num_rows).view(-1, sum(sizes))
    ends = list(accumulate(sizes))
    return [rows[:, end - size : end].flatten() for size, end in zip(sizes, ends, strict=True)]
