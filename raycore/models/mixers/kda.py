"""Kimi's delta attention as config.json describes it. Does not import torch.

Heads are divided over the ranks, and with each one its channels of the convolution. Two vectors of a token, as long as
a head, are on every rank: all heads' decays are made of one, and all heads' gates of the other.
"""

from __future__ import annotations

__all__ = ["KdaSpec"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import msgspec

from raycore.models.layer_part import ROWS, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.state import MatrixMixer
from raycore.models.rows import Rows, divided, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec


class KdaSpec(MatrixMixer, frozen=True, tag=True):
    """Layers with Kimi's delta attention. Heads of queries, keys and values are as many, and as long."""

    computed_by: ClassVar[str] = "raycore.decoder.kda_mixer.KdaMixer"
    weights_class: ClassVar[str] = "raycore.decoder.kda_mixer.KdaWeights"
    recurrence: ClassVar[str] = "raycore.state.kda.KdaRecurrence"
    refused_adapters: ClassVar[Mapping[str, str]] = {"conv1d": "adapters of convolutions aren't supported"}
    renamed: ClassVar[Mapping[str, str]] = {
        f"self_attn.forget_gate.f_{part}_proj": f"self_attn.f_{part}_proj" for part in "ab"
    }

    @property
    def num_channels(self) -> int:
        """Those of queries, then of keys, then of values."""
        return 3 * self.num_values

    @property
    def split_sizes(self) -> dict[str, int]:
        return {"linear_num_heads": self.num_v_heads}

    def of_rank(self, tp_size: int) -> KdaSpec:
        return msgspec.structs.replace(self, num_v_heads=self.num_v_heads // tp_size)

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        def own(name: str, num: int) -> Rows:
            return divided(f"self_attn.{name}", num, tp_rank, tp_size)

        read, head, values = whole("", num_inputs or model.hidden_size), whole("", self.k_dim), self.num_values
        qkv = own("q_proj", values), own("k_proj", values), own("v_proj", values)
        vectors = own("b_proj", self.num_v_heads), *(whole(f"self_attn.{name}_a_proj", self.k_dim) for name in "fg")
        output = (whole("self_attn.o_proj", model.hidden_size),)
        return (
            FusedLinear("qkv_ID", qkv, read, adapted="qkv", is_plain=True),
            FusedLinear("vectors_ID", vectors, read, adapted="b_f_g", is_plain=True),
            FusedLinear("f_OK", (own("f_b_proj", values),), head, adapted="f_b", is_plain=True),
            FusedLinear("g_OK", (own("g_b_proj", values),), head, adapted="g_b", is_plain=True),
            FusedLinear("o_DO", output, own("", values), reads_divided=True, adapted="o", is_plain=True),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        def own(name: str, num: int) -> Rows:
            return divided(f"self_attn.{name}", num, tp_rank, tp_size)

        channels = tuple(own(f"{name}_conv1d.weight", self.num_values) for name in "qkv")
        return (
            PartTensor("conv_CW", channels, (ROWS, 1, self.conv_size)),
            PartTensor("decay_N", (own("A_log", self.num_v_heads),), (1, 1, ROWS, 1), is_float32=True),
            PartTensor("bias_O", (own("dt_bias", self.num_values),), is_float32=True),
            PartTensor("norm_H", (whole("self_attn.o_norm.weight", self.v_dim),)),
        )
