"""Allocates one rank's weights of layers that keep a state, and has them filled from a checkpoint.

Key heads, or groups, are divided over the ranks, and with each one its value heads and channels of the convolution.
Weights are kept in the model's data type, whatever the checkpoint stores. Shape suffixes: D hidden size, I this rank's
rows of a projection, C its channels of the convolution, W taps, N its value heads, H elements of one, O those of all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from raycore.models.state import DeltaSpec, Mamba2Spec, StateSpec
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


@dataclass
class Mamba2Weights:
    """The weights of Mamba-2 in one layer on one rank."""

    in_ID: torch.Tensor
    """The rows of x, of B, of C and of times, in this order. With a single group, every rank has those of B and C."""
    z_OD: torch.Tensor
    """Those of the gate."""
    conv_CW: torch.Tensor
    conv_bias_C: torch.Tensor | None
    decay_N: torch.Tensor
    """float32: the logarithm of how fast states decay."""
    bias_N: torch.Tensor
    """float32: of times."""
    skip_N: torch.Tensor
    """float32: what x is multiplied by before it is added to the result."""
    norm_O: torch.Tensor
    o_DO: torch.Tensor

    @property
    def num_weights(self) -> int:
        """Number of multiplications for one token in the linear layers."""
        return self.in_ID.numel() + self.z_OD.numel() + self.o_DO.numel()


StateWeights = DeltaWeights | Mamba2Weights
"""The weights of a layer that keeps a state."""


class StateLayout:
    """Allocates one rank's layers and has `fill` fill them, possibly after `layer()` has returned."""

    def __init__(self, share: WeightShare, state: StateSpec, fill: Fill) -> None:
        self._share = share
        self._state = state
        self._fill = fill

    def layer(self, block: str) -> StateWeights:
        """Allocate the weights whose names begin with `block`."""
        state = self._state
        return self._delta(block, state) if isinstance(state, DeltaSpec) else self._mamba2(block, state)

    def _mamba2(self, block: str, state: Mamba2Spec) -> Mamba2Weights:
        share, hidden, own = self._share, self._share.spec.hidden_size, state.of_rank(self._share.tp_size)
        values, heads, groups = state.num_values, state.num_v_heads, state.num_groups * state.k_dim
        num_in = values + state.num_channels + heads
        has_all = state.num_groups == 1
        # the tensor's parts: z, x, B, C and times; where each begins, its size, and whether all ranks have it
        channels = [(0, values, False), (values, groups, has_all), (values + groups, groups, has_all)]
        inputs = [(values + first, size, is_whole) for first, size, is_whole in channels]
        inputs.append((values + state.num_channels, heads, False))
        weights = Mamba2Weights(
            in_ID=share.empty(own.num_channels + own.num_v_heads, hidden),
            z_OD=share.empty(own.num_values, hidden),
            conv_CW=share.empty(own.num_channels, state.conv_size),
            conv_bias_C=share.empty(own.num_channels) if state.has_conv_bias else None,
            decay_N=share.empty(own.num_v_heads, dtype=torch.float32),
            bias_N=share.empty(own.num_v_heads, dtype=torch.float32),
            skip_N=share.empty(own.num_v_heads, dtype=torch.float32),
            norm_O=share.empty(own.num_values),
            o_DO=share.empty(hidden, own.num_values),
        )
        self._fill_parts(weights.in_ID, f"{block}in_proj.weight", inputs, (num_in, hidden))
        self._fill_parts(weights.z_OD, f"{block}in_proj.weight", [(0, values, False)], (num_in, hidden))
        shape = state.num_channels, 1, state.conv_size
        self._fill_parts(weights.conv_CW, f"{block}conv1d.weight", channels, shape, (0,))
        if weights.conv_bias_C is not None:
            self._fill_parts(weights.conv_bias_C, f"{block}conv1d.bias", channels, shape[:1])
        for out_N, name in ((weights.decay_N, "A_log"), (weights.bias_N, "dt_bias"), (weights.skip_N, "D")):
            self._fill_rows(out_N, f"{block}{name}", [heads])
        self._fill_rows(weights.norm_O, f"{block}norm.weight", [values])
        self._fill(weights.o_DO, f"{block}out_proj.weight", (hidden, values), (slice(None), self._part(values)))
        return weights

    def _fill_parts(
        self,
        out: torch.Tensor,
        name: str,
        parts: list[tuple[int, int, bool]],
        shape: tuple[int, ...],
        of_row: tuple[int, ...] = (),
    ) -> None:
        """Fill `out` with rows of a tensor: parts that begin somewhere, with a size, of which ranks may have all."""
        start = 0
        for first, size, is_whole in parts:
            rows = slice(first, first + size) if is_whole else self._part(size, first)
            num = rows.stop - rows.start
            self._fill(out[start : start + num], name, shape, (rows, *of_row))
            start += num

    def _delta(self, block: str, state: DeltaSpec) -> DeltaWeights:
        share, hidden = self._share, self._share.spec.hidden_size
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
