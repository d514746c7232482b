"""Mamba-1 as config.json describes it. Does not import torch.

Channels are divided over the ranks. The projection between the convolution and the recurrence reads all of them, so
ranks add up its results: each rank has all of the B and the C of a token, and of what its times are made of.
"""

from __future__ import annotations

__all__ = ["Mamba1Spec"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from raycore.models.layer_part import ROWS, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.spec import StateTensor
from raycore.models.mixers.state import StateMixer
from raycore.models.rows import Rows, divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec


class Mamba1Spec(StateMixer, frozen=True, tag=True):
    """Layers of Mamba-1. Each channel has a state of its own, whose numbers decay at different rates."""

    num_channels: int
    """Number of channels of the convolution, and of the recurrence."""
    state_size: int
    """Number of numbers of a channel's state, which are as many as B and C have."""
    time_size: int
    """Number of numbers that the times of all channels are made of."""
    conv_size: int
    """Number of taps of the convolution, the token's own included."""
    has_bias: bool
    """Whether the projections of the input and of the result have biases."""
    has_conv_bias: bool
    norms: Literal["weighted", "bare"] | None = None
    """Which RMS norms B, C and what times are made of get: with weights, or without. None: none."""
    norm_eps: float = 0.0
    block: str = "mamba"
    """What the names of its tensors begin with."""
    size_key: str = "mamba_expand times hidden_size"
    """How `num_channels` follows from config.json."""

    computed_by: ClassVar[str] = "raycore.decoder.mamba1_mixer.Mamba1Mixer"
    weights_class: ClassVar[str] = "raycore.decoder.mamba1_mixer.Mamba1Weights"
    recurrence: ClassVar[str] = "raycore.state.mamba1.Mamba1Recurrence"
    refused_adapters: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (*Mamba2Spec.refused_adapters, "mixer.x_proj", "mixer.dt_proj"),
        "adapters of layers that keep a state aren't supported",
    )

    @property
    def selected_sizes(self) -> list[int]:
        """How many numbers of a token its times are made of, and how many its B and its C have."""
        return [self.time_size, self.state_size, self.state_size]

    @property
    def split_sizes(self) -> dict[str, int]:
        return {self.size_key: self.num_channels}

    def of_rank(self, tp_size: int) -> Mamba1Spec:
        return msgspec.structs.replace(self, num_channels=self.num_channels // tp_size)

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        read, own = whole("", num_inputs or model.hidden_size), divided("", self.num_channels, tp_rank, tp_size)
        inputs, output = f"{self.block}.in_proj", f"{self.block}.out_proj"
        biased = frozenset([inputs, output] if self.has_bias else [])
        selected = (whole(f"{self.block}.x_proj", sum(self.selected_sizes)),)
        times, made_of = (self._own("dt_proj", tp_rank, tp_size),), whole("", self.time_size)
        return (
            FusedLinear("in_ID", stored_together(inputs, own, own), read, "in_bias_I", biased, is_plain=True),
            FusedLinear("x_XC", selected, own, reads_divided=True, is_plain=True),
            FusedLinear("dt_CM", times, made_of, is_plain=True),
            FusedLinear(
                "o_DC",
                (whole(output, model.hidden_size),),
                own,
                "o_bias",
                biased,
                reads_divided=True,
                is_plain=True,
            ),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        def of_channels(field: str, name: str, *row: int, is_float32: bool = True) -> PartTensor:
            return PartTensor(field, (self._own(name, tp_rank, tp_size),), (ROWS, *row), is_float32)

        def of_norm(field: str, name: str, size: int) -> PartTensor:
            return PartTensor(field, (whole(f"{self.block}.{name}_layernorm.weight", size),))

        conv_bias = [of_channels("conv_bias_C", "conv1d.bias", is_float32=False)] if self.has_conv_bias else []
        norms = [
            of_norm("dt_norm_M", "dt", self.time_size),
            of_norm("b_norm_K", "b", self.state_size),
            of_norm("c_norm_K", "c", self.state_size),
        ]
        return (
            of_channels("conv_CW", "conv1d.weight", 1, self.conv_size, is_float32=False),
            *conv_bias,
            of_channels("decay_CK", "A_log", self.state_size),
            of_channels("bias_C", "dt_proj.bias"),
            of_channels("skip_C", "D"),
            *(norms if self.norms == "weighted" else []),
        )

    def state(self, tp_size: int) -> tuple[StateTensor, ...]:
        own = self.of_rank(tp_size)
        return (
            StateTensor("conv_states_RCW", (own.num_channels, own.conv_size - 1)),
            StateTensor("states_RNKH", (1, own.state_size, own.num_channels), is_float32=True),
        )

    def _own(self, name: str, tp_rank: int, tp_size: int) -> Rows:
        return divided(f"{self.block}.{name}", self.num_channels, tp_rank, tp_size)
