"""Allocates one rank's weights of layers that keep a state, and has them filled from a checkpoint.

Key heads are divided over the ranks, and with each one its value heads and its channels of the convolution. Weights are
kept in the model's data type, whatever the checkpoint stores. Shape suffixes: D hidden size, I this rank's rows of a
projection, C its channels of the convolution, W taps, N its value heads, H elements of one, O those of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raycore.models.state import DeltaSpec
from raycore.weights.moe_weights import Fill
from raycore.weights.share import WeightShare


@dataclass
class DeltaWeights:
    """The weights of the gated delta rule in one layer on one rank."""

    qkvz_ID: torch.Tensor
    """The rows of queries, keys, values and the gate z: of one key head after the other if `DeltaSpec.is_interleaved`,
    otherwise of all heads one after the other."""
    ba_ID: torch.Tensor
    """Those of b and a, in the same order."""
    conv_CW: torch.Tensor
    decay_N: torch.Tensor
    """float32: the logarithm of how fast states decay."""
    bias_N: torch.Tensor
    """float32: of a."""
    norm_H: torch.Tensor
    o_DO: torch.Tensor

    @property
    def num_weights(self) -> int:
        """Number of multiplications for one token in the linear layers."""
        return self.qkvz_ID.numel() + self.ba_ID.numel() + self.o_DO.numel()


class StateLayout:
    """Allocates one rank's layers and has `fill` fill them, possibly after `layer()` has returned."""

    def __init__(self, share: WeightShare, state: DeltaSpec, fill: Fill) -> None:
        self._share = share
        self._state = state
        self._fill = fill

    def layer(self, block: str) -> DeltaWeights:
        """Allocate the weights whose names begin with `block`."""
        share, state, hidden = self._share, self._state, self._share.spec.hidden_size
        keys, values, heads = state.num_k_heads * state.k_dim, state.num_values, state.num_v_heads
        channels = {"in_proj_qkv": [keys, keys, values]}
        qkvz, ba = channels | {"in_proj_z": [values]}, {"in_proj_b": [heads], "in_proj_a": [heads]}
        if state.is_interleaved:
            qkvz, ba = {"in_proj_qkvz": [state.num_channels + values]}, {"in_proj_ba": [2 * heads]}
        conv_CW = share.empty(state.num_channels // share.tp_size, state.conv_size)
        self._fill_rows(conv_CW, f"{block}conv1d.weight", [keys, keys, values], (1, state.conv_size), (0,))
        weights = DeltaWeights(
            qkvz_ID=self._fused(block, qkvz),
            ba_ID=self._fused(block, ba),
            conv_CW=conv_CW,
            decay_N=share.empty(heads // share.tp_size, dtype=torch.float32),
            bias_N=share.empty(heads // share.tp_size, dtype=torch.float32),
            norm_H=share.empty(state.v_dim),
            o_DO=share.empty(hidden, values // share.tp_size),
        )
        self._fill_rows(weights.decay_N, f"{block}A_log", [heads])
        self._fill_rows(weights.bias_N, f"{block}dt_bias", [heads])
        self._fill(weights.norm_H, f"{block}norm.weight", (state.v_dim,), (slice(None),))
        self._fill(weights.o_DO, f"{block}out_proj.weight", (hidden, values), (slice(None), self._part(values)))
        return weights

    def _part(self, size: int, first: int = 0) -> slice:
        """Return the rank's part of `size` rows from `first` on."""
        num = size // self._share.tp_size
        start = first + self._share.tp_rank * num
        return slice(start, start + num)

    def _fused(self, block: str, tensors: dict[str, list[int]]) -> torch.Tensor:
        """Return the rank's rows of projections, one below the other.

        `tensors`: by name, the numbers of rows of parts, each of which is divided over the ranks.
        """
        share, hidden = self._share, self._share.spec.hidden_size
        out_ID = share.empty(sum(map(sum, tensors.values())) // share.tp_size, hidden)
        start = 0
        for name, parts in tensors.items():
            num = sum(parts) // share.tp_size
            self._fill_rows(out_ID[start : start + num], f"{block}{name}.weight", parts, (hidden,))
            start += num
        return out_ID

    def _fill_rows(
        self, out: torch.Tensor, name: str, parts: list[int], row: tuple[int, ...] = (), of_row: tuple[int, ...] = ()
    ) -> None:
        """Fill `out` with the rank's rows of a tensor's parts.

        Args:
            row: the shape of a row.
            of_row: which part of a row is wanted.
        """
        start = first = 0
        for size in parts:
            num = size // self._share.tp_size
            self._fill(out[start : start + num], name, (sum(parts), *row), (self._part(size, first), *of_row))
            start, first = start + num, first + size
