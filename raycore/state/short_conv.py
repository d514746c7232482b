"""Convolutions over a few tokens, without any other state, in plain torch.

Shape suffixes: those of `raycore.state.spec`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.state.recurrence import Recurrence
from raycore.state.spec import StateStep
from raycore.state.torch_step import TorchSteps
from raycore.step.memory import FLOAT32_BYTES, INT64_BYTES, StepLimits


@dataclass(slots=True, frozen=True)
class ShortConvLayer:
    """What a layer with a short convolution has beside its projections, and its states."""

    conv_CW: Tensor
    """The taps of each channel, the oldest first. In the model's data type."""
    conv_bias_C: Tensor | None
    """Is added to the convolution. In the model's data type."""
    conv_states_RCW: Tensor
    """[R, C, W - 1]: the last inputs of the convolution, the oldest first."""


class TorchShortConv:
    """Computes short convolutions. They are always batch-invariant."""

    def __init__(self, shape: ShortConvSpec, *, batch_invariant: bool = False) -> None:
        self._steps = TorchSteps(shape.conv_size)

    def __call__(self, layer: ShortConvLayer, x_TC: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, C] in the data type of `x_TC`."""
        indexes = self._steps.of(step, x_TC)
        return indexes.convolve(x_TC, layer.conv_CW, layer.conv_bias_C, layer.conv_states_RCW).to(x_TC.dtype)


class ShortConvRecurrence(Recurrence):
    """Computes layers with a short convolution.

    A token's result is, by channel, the sum of the last W inputs of its sequence times the taps, in float32. Before a
    sequence's first token, there are zeros. Source: LFM2 (https://arxiv.org/abs/2511.23404), which has gates before and
    after.
    """

    _own: ShortConvSpec
    layer = ShortConvLayer
    by_torch = TorchShortConv

    def step_bytes(self, limits: StepLimits, hidden_size: int, item_size: int, *, is_native: bool) -> int:
        own, num_seqs = self._own, min(limits.num_seqs, limits.num_tokens)
        # the projection's outputs, the inputs twice, those of one tap, and the result; sums and products
        in_dtype = 3 * hidden_size + 7 * own.num_channels
        of_token = in_dtype * item_size + 3 * own.num_channels * FLOAT32_BYTES + own.conv_size * INT64_BYTES
        return limits.num_tokens * of_token + num_seqs * 4 * own.num_channels * own.conv_size * item_size
