"""Recurrences of states by Triton's kernels for GPUs.

A token's result has the same bits whatever else the step computes, and however its prompt is divided into steps. So
these kernels are always batch-invariant.
"""

from __future__ import annotations

from torch import Tensor

from raycore.kernels.gpu.recurrence import LayerTensors, Places, compute
from raycore.kernels.state_tables import StateTables, state_tables
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.state.delta import DeltaLayer
from raycore.state.mamba2 import Mamba2Layer
from raycore.state.spec import StateStep
from raycore.step.copies import to_device_together


class TritonDelta:
    """Computes the gated delta rule."""

    def __init__(self, shape: DeltaSpec) -> None:
        key_size = shape.num_k_heads * shape.k_dim
        self._places = Places(
            shape.num_k_heads,
            shape.num_v_heads,
            shape.k_dim,
            shape.v_dim,
            shape.conv_size,
            queries=0,
            keys=key_size,
            values=2 * key_size,
            times=shape.num_channels + shape.num_v_heads,
            betas=shape.num_channels,
            largest_share=shape.largest_share,
        )
        self._tables = _LatestTables()

    def __call__(self, layer: DeltaLayer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        tensors = LayerTensors(
            layer.conv_CW, None, layer.decay_N, layer.bias_N, None, layer.conv_states_RCW, layer.states_RNKH
        )
        return compute(self._places, tensors, x_TX, self._tables.of(step, x_TX))


class TritonMamba2:
    """Computes Mamba-2's recurrence."""

    def __init__(self, shape: Mamba2Spec) -> None:
        value_size = shape.num_values
        self._places = Places(
            shape.num_groups,
            shape.num_v_heads,
            shape.k_dim,
            shape.v_dim,
            shape.conv_size,
            queries=value_size + shape.num_groups * shape.k_dim,
            keys=value_size,
            values=0,
            times=shape.num_channels,
            betas=None,
            least_time=shape.least_time,
            longest_time=shape.longest_time,
        )
        self._tables = _LatestTables()

    def __call__(self, layer: Mamba2Layer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        tensors = LayerTensors(
            layer.conv_CW,
            layer.conv_bias_C,
            layer.decay_N,
            layer.bias_N,
            layer.skip_N,
            layer.conv_states_RCW,
            layer.states_RNKH,
        )
        return compute(self._places, tensors, x_TX, self._tables.of(step, x_TX))


class _LatestTables:
    """The tables of a step on the device: the step's own, or copies of what the host knows, which its layers share."""

    def __init__(self) -> None:
        self._step: StateStep | None = None
        self._tables: StateTables | None = None

    def of(self, step: StateStep, x_TX: Tensor) -> StateTables:
        if step.tables is not None:
            return step.tables
        if self._tables is None or self._step is not step:
            self._step = step
            self._tables = StateTables(*to_device_together(state_tables(step.sequences_n4, step.saves_S3), x_TX.device))
        return self._tables
