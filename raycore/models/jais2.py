"""Jais 2: layer norms and biases everywhere, and no gates: the activation is the square of what is above 0."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, norm_eps_at, plain_parts
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 150272,
    "hidden_size": 3328,
    "intermediate_size": 26624,
    "num_attention_heads": 26,
    "hidden_act": "relu2",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "mlp_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 150024,
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
    )


JAIS2 = Family(_DEFAULTS, _parts, norm_eps_at("layer_norm_eps"))
