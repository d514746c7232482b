"""The gated delta rule as config.json describes it. Does not import torch.

Key heads are divided over the ranks, and with each one its value heads and its channels of the convolution.
"""

from __future__ import annotations

__all__ = ["DeltaSpec"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.models.layer_part import ROWS, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.state import MatrixMixer
from raycore.models.rows import Rows, divided, stored_together, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec


class DeltaSpec(MatrixMixer, frozen=True, tag=True):
    """Layers with the gated delta rule."""

    num_k_heads: int
    """Divides `num_v_heads`: value head i reads key head `i // (num_v_heads // num_k_heads)`."""
    is_interleaved: bool
    """Whether checkpoints have one tensor for queries, keys, values and the gate z, and one for b and a, with the rows
    of one key head after the other. Otherwise, queries, keys and values share a tensor, one after the other, and the
    rest have tensors of their own."""
    is_split: bool = False
    """Whether queries, keys and values have tensors of their own instead, for their convolutions, too. All names are
    those of Kimi's delta attention then."""
    largest_share: float = 1.0
    """What the share of a value that is written is at most: the sigmoid of b is multiplied by it."""
    norm_eps: float | None = None
    """What the norm of the result adds to the mean square. None: what the model's other norms add."""

    computed_by: ClassVar[str] = "raycore.decoder.delta_mixer.DeltaMixer"
    weights_class: ClassVar[str] = "raycore.decoder.delta_mixer.DeltaWeights"
    recurrence: ClassVar[str] = "raycore.state.delta.DeltaRecurrence"
    refused_adapters: ClassVar[Mapping[str, str]] = {
        "linear_attn": "adapters of layers that keep a state aren't supported"
    }

    @property
    def num_channels(self) -> int:
        """Those of queries, then of keys, then of values."""
        return 2 * self.num_k_heads * self.k_dim + self.num_values

    @property
    def split_sizes(self) -> dict[str, int]:
        return {"linear_num_key_heads": self.num_k_heads}

    def of_rank(self, tp_size: int) -> DeltaSpec:
        return msgspec.structs.replace(
            self, num_k_heads=self.num_k_heads // tp_size, num_v_heads=self.num_v_heads // tp_size
        )

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        def own(name: str, num: int) -> Rows:
            return divided(f"linear_attn.{name}", num, tp_rank, tp_size)

        read, values = whole("", num_inputs or model.hidden_size), own("", self.num_values)
        keys = self.num_k_heads * self.k_dim
        if self.is_split:
            qkvz = (
                own("q_proj", keys),
                own("k_proj", keys),
                own("v_proj", self.num_values),
                own("g_proj", self.num_values),
            )
            ba = own("b_proj", self.num_v_heads), own("a_proj", self.num_v_heads)
        elif self.is_interleaved:
            qkvz = (own("in_proj_qkvz", self.num_channels + self.num_values),)
            ba = (own("in_proj_ba", 2 * self.num_v_heads),)
        else:
            qkvz = (*self._channels("linear_attn.in_proj_qkv", tp_rank, tp_size), own("in_proj_z", self.num_values))
            ba = own("in_proj_b", self.num_v_heads), own("in_proj_a", self.num_v_heads)
        output = (whole(f"linear_attn.{'o' if self.is_split else 'out'}_proj", model.hidden_size),)
        return (
            FusedLinear("qkvz_ID", qkvz, read, is_plain=True),
            FusedLinear("ba_ID", ba, read, is_plain=True),
            FusedLinear("o_DO", output, values, reads_divided=True, is_plain=True),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        channels = self._channels("linear_attn.conv1d.weight", tp_rank, tp_size)
        decay, bias = (
            divided(f"linear_attn.{name}", self.num_v_heads, tp_rank, tp_size) for name in ("A_log", "dt_bias")
        )
        return (
            PartTensor("conv_CW", channels, (ROWS, 1, self.conv_size)),
            PartTensor("decay_N", (decay,), is_float32=True),
            PartTensor("bias_N", (bias,), is_float32=True),
            PartTensor("norm_H", (whole(f"linear_attn.{'o_norm' if self.is_split else 'norm'}.weight", self.v_dim),)),
        )

    def _channels(self, name: str, tp_rank: int, tp_size: int) -> tuple[Rows, ...]:
        """Return the rows of queries, keys and values in a tensor that has nothing else."""
        keys = self.num_k_heads * self.k_dim
        sizes = {"q": keys, "k": keys, "v": self.num_values}
        own = {each: divided("", size, tp_rank, tp_size) for each, size in sizes.items()}
        if self.is_split:
            return tuple(rows._replace(name=name.replace("conv1d", f"{each}_conv1d")) for each, rows in own.items())
        return stored_together(name, *own.values())
