"""Mamba-2 as config.json describes it. Does not import torch.

Groups are divided over the ranks, and with each one its heads and its channels of the convolution. All ranks have the B
and the C of a single group.
"""

from __future__ import annotations

__all__ = ["Mamba2Spec"]

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import msgspec

from raycore.models.layer_part import ROWS, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.state import MatrixMixer
from raycore.models.rows import Rows, divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec


class Mamba2Spec(MatrixMixer, frozen=True, tag=True, omit_defaults=True):  # JSON has no infinity
    """Layers of Mamba-2. Its B and C are keys and queries, which the heads of a group share."""

    num_groups: int
    """Divides `num_v_heads`: head i reads group `i // (num_v_heads // num_groups)`."""
    has_conv_bias: bool
    least_time: float = 0.0
    longest_time: float = math.inf
    """Times are limited to this range, after softplus."""
    block: str = "mamba"
    """What the names of its tensors begin with."""
    size_keys: tuple[str, str] = ("mamba_n_heads", "mamba_n_groups")
    """What config.json calls the numbers of heads and of groups."""
    norm: Literal["after_gate", "before_gate"] | None = "after_gate"
    """Whether the result is normalized after it is multiplied by the gate, or before. None: it isn't."""
    multipliers: tuple[float, float, float, float, float] = (1.0, 1.0, 1.0, 1.0, 1.0)
    """What the projections of the gate, of x, of B, of C and of times are multiplied by."""

    computed_by: ClassVar[str] = "raycore.decoder.mamba2_mixer.Mamba2Mixer"
    weights_class: ClassVar[str] = "raycore.decoder.mamba2_mixer.Mamba2Weights"
    recurrence: ClassVar[str] = "raycore.state.mamba2.Mamba2Recurrence"
    refused_adapters: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("mamba", "mixer.in_proj", "mixer.out_proj"), "adapters of layers that keep a state aren't supported"
    )

    @property
    def num_channels(self) -> int:
        """Those of x, then of B, then of C."""
        return self.num_values + 2 * self.num_groups * self.k_dim

    @property
    def split_sizes(self) -> dict[str, int]:
        if self.num_groups == 1:
            return {self.size_keys[0]: self.num_v_heads}
        return {self.size_keys[1]: self.num_groups}

    def of_rank(self, tp_size: int) -> Mamba2Spec:
        num_groups = max(1, self.num_groups // tp_size)
        return msgspec.structs.replace(self, num_groups=num_groups, num_v_heads=self.num_v_heads // tp_size)

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        values = divided("", self.num_values, tp_rank, tp_size)
        z, *inputs = stored_together(
            f"{self.block}.in_proj",
            values,
            *self._channels(tp_rank, tp_size),
            divided("", self.num_v_heads, tp_rank, tp_size),
        )
        read, output = whole("", num_inputs or model.hidden_size), (whole(f"{self.block}.out_proj", model.hidden_size),)
        return (
            FusedLinear("in_ID", tuple(inputs), read, is_plain=True),
            FusedLinear("z_OD", (z,), read, is_plain=True),
            FusedLinear("o_DO", output, values, reads_divided=True, is_plain=True),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        def of_channels(field: str, name: str, *row: int) -> PartTensor:
            return PartTensor(
                field, stored_together(f"{self.block}.{name}", *self._channels(tp_rank, tp_size)), (ROWS, *row)
            )

        def of_heads(field: str, name: str) -> PartTensor:
            return PartTensor(
                field, (divided(f"{self.block}.{name}", self.num_v_heads, tp_rank, tp_size),), is_float32=True
            )

        norm = divided(f"{self.block}.norm.weight", self.num_values, tp_rank, tp_size)
        return (
            of_channels("conv_CW", "conv1d.weight", 1, self.conv_size),
            *([of_channels("conv_bias_C", "conv1d.bias")] if self.has_conv_bias else []),
            of_heads("decay_N", "A_log"),
            of_heads("bias_N", "dt_bias"),
            of_heads("skip_N", "D"),
            *([] if self.norm is None else [PartTensor("norm_O", (norm,))]),
        )

    def _channels(self, tp_rank: int, tp_size: int) -> tuple[Rows, ...]:
        """Return the rows of x, B and C among all of them."""
        group = self.num_groups * self.k_dim
        of_group = whole("", group) if self.num_groups == 1 else divided("", group, tp_rank, tp_size)
        return divided("", self.num_values, tp_rank, tp_size), of_group, of_group
