"""The weights of multi-head latent attention. The loader fills them.

Shape suffixes: D hidden size, O this rank's rows of the fused first layer, Q size of the vector that queries are made
of, R size of a latent, P and X this rank's rows of the layers that read these two, N its heads, Y its outputs of
attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from raycore.weights.layer_part_weights import LayerPartWeights
from raycore.weights.weight import Weight


@dataclass
class LatentWeights(LayerPartWeights):
    """The weights of latent attention in one layer on one rank."""

    inputs_OD: Weight
    """What queries are made of, or this rank's queries; then latents and rotated keys."""
    kv_norm_R: Tensor
    kv_b_XR: Tensor
    """This rank's heads, each with its key and then its value. It is never quantized, because it is applied to queries
    and to the results of attention, and not to latents."""
    o_DY: Weight
    """The columns for this rank's heads."""
    inputs_bias_O: Tensor | None = None
    """Zero for queries."""
    q_norm_Q: Tensor | None = None
    """None, like `q_b_PQ`, if the first layer makes queries."""
    q_b_PQ: Weight | None = None
    """This rank's queries."""
    gate_ND: Tensor | None = None
    """A row for each of this rank's heads."""
    o_bias: Tensor | None = None
    """None on ranks other than tp_rank 0, like `MlpWeights.down_bias`."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "inputs_OD": "self_attn.latent_proj.weight",
        "inputs_bias_O": "self_attn.latent_proj.bias",
        "q_norm_Q": "self_attn.q_a_layernorm.weight",
        "q_b_PQ": "self_attn.q_b_proj.weight",
        "kv_norm_R": "self_attn.kv_a_layernorm.weight",
        "kv_b_XR": "self_attn.kv_b_proj.weight",
        "gate_ND": "self_attn.g_proj.weight",
        "o_DY": "self_attn.o_proj.weight",
        "o_bias": "self_attn.o_proj.bias",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("inputs_OD", "q_b_PQ", "kv_b_XR", "gate_ND", "o_DY")
