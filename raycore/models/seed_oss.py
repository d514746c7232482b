"""Seed-OSS: Llama with biases of queries, keys and values."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 155136,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 524288,
    "attention_bias": True,
    "bos_token_id": 0,
}


def _parts(config: JsonFields) -> Parts:
    return plain_parts(
        config,
        qkv_bias=config.bool_("attention_bias"),
        o_bias=config.bool_("attention_out_bias"),
        mlp_bias=config.bool_("mlp_bias"),
    )


SEED_OSS = Family(_DEFAULTS, _parts)
