"""Mamba-2 as config.json describes it. Does not import torch.

Groups are divided over the ranks, and with each one its heads and its channels of the convolution. All ranks have the B
and the C of a single group.
"""

from __future__ import annotations

__all__ = ["Mamba2Spec"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.models.linears import FusedLinear
from raycore.models.mixers.spec import MixerTensor, StateTensor
from raycore.models.mixers.state import StateMixer
from raycore.models.rows import Rows, divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec


class Mamba2Spec(StateMixer, frozen=True, tag=True):
    """Layers of Mamba-2. Sizes are those of the whole model."""

    num_groups: int
    num_v_heads: int
    """A multiple of `num_groups`."""
    k_dim: int
    """Size of the state of each of a head's elements."""
    v_dim: int
    """Elements of a head."""
    conv_size: int
    """Number of taps of the convolution, the token's own included."""
    has_conv_bias: bool

    computed_by: ClassVar[str] = "raycore.decoder.mamba2_mixer.Mamba2Mixer"
    weights_class: ClassVar[str] = "raycore.weights.state_weights.Mamba2Weights"
    recurrence: ClassVar[str] = "raycore.state.mamba2.Mamba2Recurrence"
    refused_adapters: ClassVar[Mapping[str, str]] = {"mamba": "adapters of layers that keep a state aren't supported"}

    @property
    def num_channels(self) -> int:
        """Number of channels of the convolution: those of x, then of B, then of C."""
        return self.num_values + 2 * self.num_groups * self.k_dim

    @property
    def num_values(self) -> int:
        """Number of elements of all heads."""
        return self.num_v_heads * self.v_dim

    @property
    def split_sizes(self) -> dict[str, int]:
        if self.num_groups == 1:
            return {"mamba_n_heads": self.num_v_heads}
        return {"mamba_n_groups": self.num_groups}

    def of_rank(self, tp_size: int) -> Mamba2Spec:
        num_groups = max(1, self.num_groups // tp_size)
        return msgspec.structs.replace(self, num_groups=num_groups, num_v_heads=self.num_v_heads // tp_size)

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        values = divided("", self.num_values, tp_rank, tp_size)
        z, *inputs = stored_together(
            "mamba.in_proj",
            values,
            *self._channels(tp_rank, tp_size),
            divided("", self.num_v_heads, tp_rank, tp_size),
        )
        read, output = whole("", num_inputs or model.hidden_size), (whole("mamba.out_proj", model.hidden_size),)
        return (
            FusedLinear("in_ID", tuple(inputs), read, is_plain=True),
            FusedLinear("z_OD", (z,), read, is_plain=True),
            FusedLinear("o_DO", output, values, reads_divided=True, is_plain=True),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[MixerTensor, ...]:
        def of_channels(field: str, name: str, *row: int) -> MixerTensor:
            parts = stored_together(f"mamba.{name}", *self._channels(tp_rank, tp_size))
            return MixerTensor(field, parts, row, (0,) * (len(row) - 1))

        def of_heads(field: str, name: str) -> MixerTensor:
            return MixerTensor(field, (divided(f"mamba.{name}", self.num_v_heads, tp_rank, tp_size),), is_float32=True)

        return (
            of_channels("conv_CW", "conv1d.weight", 1, self.conv_size),
            *([of_channels("conv_bias_C", "conv1d.bias")] if self.has_conv_bias else []),
            of_heads("decay_N", "A_log"),
            of_heads("bias_N", "dt_bias"),
            of_heads("skip_N", "D"),
            MixerTensor("norm_O", (divided("mamba.norm.weight", self.num_values, tp_rank, tp_size),)),
        )

    def state(self, tp_size: int) -> tuple[StateTensor, ...]:
        own = self.of_rank(tp_size)
        return (
            StateTensor("conv_states_RCW", (own.num_channels, own.conv_size - 1)),
            StateTensor("states_RNKH", (own.num_v_heads, own.k_dim, own.v_dim), is_float32=True),
        )

    def _channels(self, tp_rank: int, tp_size: int) -> tuple[Rows, ...]:
        """Return the rows of x, B and C among all of them."""
        group = self.num_groups * self.k_dim
        of_group = whole("", group) if self.num_groups == 1 else divided("", group, tp_rank, tp_size)
        return divided("", self.num_values, tp_rank, tp_size), of_group, of_group
