"""Short convolutions with gates as config.json describes them. Does not import torch.

Channels are divided over the ranks, and with them the rows of both gates.
"""

from __future__ import annotations

__all__ = ["ShortConvSpec"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.models.layer_part import ROWS, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.spec import StateTensor
from raycore.models.mixers.state import StateMixer
from raycore.models.rows import divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_IN, _OUT, _CONV = "conv.in_proj", "conv.out_proj", "conv.conv"


class ShortConvSpec(StateMixer, frozen=True, tag=True):
    """Layers with a convolution over a few tokens. Their state is the convolution's last inputs."""

    num_channels: int
    """Number of channels of the convolution: the hidden size."""
    conv_size: int
    """Number of taps of the convolution, the token's own included. At least 2."""
    has_bias: bool
    """Whether the convolution and both projections have biases."""

    computed_by: ClassVar[str] = "raycore.decoder.short_conv_mixer.ShortConvMixer"
    weights_class: ClassVar[str] = "raycore.decoder.short_conv_mixer.ShortConvWeights"
    recurrence: ClassVar[str] = "raycore.state.short_conv.ShortConvRecurrence"
    refused_adapters: ClassVar[Mapping[str, str]] = {f"{_CONV}.": "adapters of convolutions aren't supported"}

    @property
    def split_sizes(self) -> dict[str, int]:
        return {"hidden_size": self.num_channels}

    def of_rank(self, tp_size: int) -> ShortConvSpec:
        return msgspec.structs.replace(self, num_channels=self.num_channels // tp_size)

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        own = divided("", self.num_channels, tp_rank, tp_size)
        return (
            FusedLinear(
                "in_ID",
                stored_together(_IN, own, own, own),
                whole("", num_inputs or model.hidden_size),
                bias_field="in_bias_I",
                biased=self._biased(_IN),
                adapted="in",
            ),
            FusedLinear(
                "o_DO",
                (whole(_OUT, model.hidden_size),),
                own,
                bias_field="o_bias",
                biased=self._biased(_OUT),
                reads_divided=True,
                adapted="o",
            ),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        weight, bias = (divided(f"{_CONV}.{name}", self.num_channels, tp_rank, tp_size) for name in ("weight", "bias"))
        return (
            PartTensor("conv_CW", (weight,), (ROWS, 1, self.conv_size)),
            *([PartTensor("conv_bias_C", (bias,))] if self.has_bias else []),
        )

    def sizes(self, model: ModelSpec, tp_size: int) -> dict[str, int]:
        return {"channels of the convolution": self.num_channels // tp_size}

    def state(self, tp_size: int) -> tuple[StateTensor, ...]:
        return (StateTensor("conv_states_RCW", (self.num_channels // tp_size, self.conv_size - 1)),)

    def _biased(self, name: str) -> frozenset[str]:
        return frozenset([name] if self.has_bias else [])
