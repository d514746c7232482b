"""The weights of attention. The loader fills them.

Shape suffixes: D hidden size, O this rank's query, key and value rows, H elements of a head, N this rank's query heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from raycore.weights.layer_part_weights import LayerPartWeights
from raycore.weights.weight import Weight


@dataclass
class AttentionWeights(LayerPartWeights):
    """The weights of attention in one layer on one rank."""

    qkv_OD: Weight
    """This rank's query rows, then its key rows, then its value rows."""
    o_DO: Weight
    """The columns for this rank's query heads."""
    qkv_bias_O: Tensor | None = None
    q_norm_H: Tensor | None = None
    k_norm_H: Tensor | None = None
    """Like `q_norm_H`, for all heads of the rank where the norm is over all heads together, or heads have weights of
    their own."""
    sinks_N: Tensor | None = None
    """Those of this rank's query heads."""
    gate_XD: Weight | None = None
    """The rows for this rank's query heads. None: the model has no such gate."""
    o_bias: Tensor | None = None
    """None on ranks other than tp_rank 0, like `MlpWeights.down_bias`."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "qkv_OD": "self_attn.qkv_proj.weight",
        "qkv_bias_O": "self_attn.qkv_proj.bias",
        "q_norm_H": "self_attn.q_norm.weight",
        "k_norm_H": "self_attn.k_norm.weight",
        "sinks_N": "self_attn.sinks",
        "gate_XD": "self_attn.gate_proj.weight",
        "o_DO": "self_attn.o_proj.weight",
        "o_bias": "self_attn.o_proj.bias",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("qkv_OD", "gate_XD", "o_DO")
