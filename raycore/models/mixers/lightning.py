"""Lightning attention as config.json describes it. Does not import torch.

It is linear attention: a state for each head, to which each token adds the product of its key and its value. States
decay by a factor that depends on the head and the layer alone. Ranks divide heads.
"""

from __future__ import annotations

__all__ = ["LightningSpec"]

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from raycore.models.layer_part import PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.state import MatrixMixer
from raycore.models.rows import Rows, divided, whole

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec

_BLOCK = "self_attn"


class LightningSpec(MatrixMixer, frozen=True, tag=True):
    """Layers with lightning attention. Heads of queries, keys and values are as many, and as long.

    Mamba-2 computes it, with a convolution that returns its inputs: queries, keys and values are its C, B and x, each
    head is a group of its own, and all times are 1.
    """

    conv_size: int = 2
    """The least that kernels know."""

    computed_by: ClassVar[str] = "raycore.decoder.lightning_mixer.LightningMixer"
    weights_class: ClassVar[str] = "raycore.decoder.lightning_mixer.LightningWeights"
    recurrence: ClassVar[str] = Mamba2Spec.recurrence
    refused_adapters: ClassVar[Mapping[str, str]] = {}

    @property
    def num_channels(self) -> int:
        """Those of values, then of keys, then of queries."""
        return 3 * self.num_values

    @property
    def split_sizes(self) -> dict[str, int]:
        return {"num_attention_heads": self.num_v_heads}

    def of_rank(self, tp_size: int) -> Mamba2Spec:
        num_heads = self.num_v_heads // tp_size
        return Mamba2Spec(
            layers=self.layers,
            num_v_heads=num_heads,
            k_dim=self.k_dim,
            v_dim=self.v_dim,
            conv_size=self.conv_size,
            num_groups=num_heads,
            has_conv_bias=False,
            least_time=1.0,
            longest_time=1.0,
            norm=None,
        )

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        def own(name: str, num: int) -> Rows:
            return divided(f"{_BLOCK}.{name}", num, tp_rank, tp_size)

        read, values = whole("", num_inputs or model.hidden_size), self.num_values
        output = (whole(f"{_BLOCK}.out_proj", model.hidden_size),)
        return (
            # of one head after the other: its query, its key, its value
            FusedLinear("qkv_ID", (own("qkv_proj", 3 * values),), read, adapted="qkv", is_plain=True),
            FusedLinear("gate_OD", (own("output_gate", values),), read, adapted="output_gate", is_plain=True),
            FusedLinear("o_DO", output, own("", values), reads_divided=True, adapted="o", is_plain=True),
        )

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        return (PartTensor("norm_O", (divided(f"{_BLOCK}.norm.weight", self.num_values, tp_rank, tp_size),)),)
