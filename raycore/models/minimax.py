"""MiniMax-Text-01: layers with lightning attention among some with attention, and experts in every layer.

What a block has read, the normalized hidden states, and its result are multiplied and added up.
"""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, fields_of, plain_parts
from raycore.models.mixers.lightning import LightningSpec
from raycore.models.mixers.state import state_layers
from raycore.models.rotation import head_dim, parse_minimax_rotation
from raycore.models.spec import BlockSum, LayerSums, Parts
from raycore.parts.experts.models import ExpertChoice, ExpertNames, MoeSpec, num_chosen, num_experts

_FACTORS = [f"{block}_{factor}_factor" for block in ("full_attn", "linear_attn", "mlp") for factor in ("alpha", "beta")]
_DEFAULTS = {
    **DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    **dict.fromkeys(_FACTORS, 1.0),
}


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with a type for each layer: without them, every second one keeps a state."""
    fields = fields_of(config, _DEFAULTS)
    if fields.get("layer_types") is None:
        types = [
            "linear_attention" if layer % 2 else "full_attention" for layer in range(fields.int_("num_hidden_layers"))
        ]
        config["layer_types"] = types
    return config


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"hidden_act": "silu"})
    layers, size = state_layers(config), head_dim(config)
    mlp = _sum(config, "mlp")
    of_mixers = {
        keeps_state: _sum(config, "linear_attn" if keeps_state else "full_attn") for keeps_state in (False, True)
    }
    return plain_parts(
        config,
        rotations=[parse_minimax_rotation(config)] * len(layers),
        layer_windows=[config.optional_int("sliding_window")] * len(layers),
        state=LightningSpec(layers, config.int_("num_attention_heads"), size, size) if any(layers) else None,
        sums=[LayerSums(of_mixers[keeps_state], mlp) for keeps_state in layers],
        moe=MoeSpec(
            num_experts(config),
            num_chosen(config),
            config.int_("intermediate_size"),
            [True] * len(layers),
            ExpertChoice(is_normalized=True),
            names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
            size_key="intermediate_size",
        ),
    )


def _sum(config: JsonFields, block: str) -> BlockSum:
    return BlockSum(*(config.float_(f"{block}_{factor}_factor") for factor in ("alpha", "beta")))


MINIMAX = Family(_DEFAULTS, _parts, _convert)
