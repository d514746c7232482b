"""Kimi's delta attention as config.json describes it. Does not import torch.

Heads are divided over the ranks, and with each one its channels of the convolution. Two vectors of a token, as long as
a head, are on every rank: all heads' decays are made of one, and all heads' gates of the other. Or both are made of the
layer's input (`is_direct`).
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

    is_direct: bool = False
    """Whether decays and gates are linear functions of the layer's input, without a vector between."""
    least_decay: float | None = None
    """Then decays are this negative number times a sigmoid, instead of a softplus, times -1. None: they have no limit.
    """
    block: str = "self_attn"
    """What the names of its tensors begin with."""

    computed_by: ClassVar[str] = "raycore.decoder.kda_mixer.KdaMixer"
    weights_class: ClassVar[str] = "raycore.decoder.kda_mixer.KdaWeights"
    recurrence: ClassVar[str] = "raycore.state.kda.KdaRecurrence"
    refused_adapters: ClassVar[Mapping[str, str]] = {"conv1d": "adapters of convolutions aren't supported"}

    def renamed(self, model: ModelSpec) -> Mapping[str, str]:
        decays = ("f",) if self.is_direct else ("f_a", "f_b")
        names = {f"self_attn.{name}_proj": f"{self.block}.{name}_proj" for name in "qkvbg"}
        names |= {f"self_attn.forget_gate.{name}_proj": f"{self.block}.{name}_proj" for name in decays}
        return names | {"self_attn.o_proj": model.names.o}

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
            return divided(f"{self.block}.{name}", num, tp_rank, tp_size)

        read, head, values = whole("", num_inputs or model.hidden_size), whole("", self.k_dim), self.num_values
        qkv, b = (own("q_proj", values), own("k_proj", values), own("v_proj", values)), own("b_proj", self.num_v_heads)
        output = (whole(model.names.o, model.hidden_size),)
        if self.is_direct:
            vectors, made = (b, own("f_proj", values), own("g_proj", values)), ()
        else:
            vectors = b, *(whole(f"{self.block}.{name}_a_proj", self.k_dim) for name in "fg")
            made = (
                FusedLinear("f_OK", (own("f_b_proj", values),), head, adapted="f_b", is_plain=True),
                FusedLinear("g_OK", (own("g_b_proj", values),), head, adapted="g_b", is_plain=True),
            )
        return (
            FusedLinear("qkv_ID", qkv, read, adapted="qkv", is_plain=True),
            FusedLinear("vectors_ID", vectors, read, adapted="b_f_g", is_plain=True),
            *made,
            FusedLinear("o_DO", output, own("", values), reads_divided=True, adapted="o", is_plain=True),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        def own(name: str, num: int) -> Rows:
            return divided(f"{self.block}.{name}", num, tp_rank, tp_size)

        channels = tuple(own(f"{name}_conv1d.weight", self.num_values) for name in "qkv")
        of_decays = (ROWS,) if self.is_direct else (1, 1, ROWS, 1)
        return (
            PartTensor("conv_CW", channels, (ROWS, 1, self.conv_size)),
            PartTensor("decay_N", (own("A_log", self.num_v_heads),), of_decays, is_float32=True),
            PartTensor("bias_O", (own("dt_bias", self.num_values),), is_float32=True),
            PartTensor("norm_H", (whole(f"{self.block}.o_norm.weight", self.v_dim),)),
        )
