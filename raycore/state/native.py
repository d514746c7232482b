"""Recurrences of states by native kernels for CPUs, which read and write states where they lie.

A token's result has the same bits whatever else the step computes, however its prompt is divided into steps, and with
any number of threads. So these kernels are always batch-invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.state.delta import DeltaLayer
from raycore.state.mamba2 import Mamba2Layer
from raycore.state.spec import StateStep


class NativeDelta:
    """Computes the gated delta rule."""

    def __init__(self, shape: DeltaSpec) -> None:
        # a checkout's library may be older than its sources
        share = () if shape.largest_share == 1.0 else (shape.largest_share,)
        self._sizes = shape.num_k_heads, *share
        self._tables = _StepTables()
        self._nothing = torch.empty(0)
        self._compute = torch.ops.raycore.gated_delta.default

    def __call__(self, layer: DeltaLayer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        return self._compute(
            x_TX,
            layer.conv_CW,
            self._nothing,
            layer.decay_N,
            layer.bias_N,
            self._nothing,
            layer.conv_states_RCW,
            layer.states_RNKH,
            *self._tables.of(step),
            *self._sizes,
        )


class NativeMamba2:
    """Computes Mamba-2's recurrence."""

    def __init__(self, shape: Mamba2Spec) -> None:
        self._shape = shape
        self._tables = _StepTables()
        self._nothing = torch.empty(0)
        self._compute = torch.ops.raycore.mamba2.default

    def __call__(self, layer: Mamba2Layer, x_TX: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, N·H] in the data type of `x_TX`."""
        return self._compute(
            x_TX,
            layer.conv_CW,
            self._nothing if layer.conv_bias_C is None else layer.conv_bias_C,
            layer.decay_N,
            layer.bias_N,
            layer.skip_N,
            layer.conv_states_RCW,
            layer.states_RNKH,
            *self._tables.of(step),
            self._shape.num_groups,
            self._shape.least_time,
            self._shape.longest_time,
        )


class _StepTables:
    """The sequences and saves of the latest step as tensors, so that its layers share them."""

    def __init__(self) -> None:
        self._step: StateStep | None = None
        self._tables = (torch.empty(0), torch.empty(0))

    def of(self, step: StateStep) -> tuple[Tensor, Tensor]:
        if self._step is not step:
            self._step = step
            self._tables = (torch.as_tensor(step.sequences_n4), torch.as_tensor(step.saves_S3))
        return self._tables
