"""Nemotron 4 and Minitron: layer norms whose weights lack 1, half of each head is rotated, and no gates."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, norm_eps_at, plain_parts
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 2,
    "eos_token_id": 3,
}


def _parts(config: JsonFields) -> Parts:
    has_bias = config.bool_("attention_bias")
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=config.bool_("mlp_bias"),
        is_gated=False,
        norm="biased_layer",
        norm_offset=1.0,
    )


NEMOTRON = Family(_DEFAULTS, _parts, norm_eps_at("norm_eps"))
