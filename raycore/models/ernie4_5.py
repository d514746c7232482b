"""ERNIE 4.5, dense: Llama whose rotated pairs are adjacent."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts

ERNIE4_5_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 103424,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 18,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}


def _parts(config: JsonFields) -> Parts:
    has_bias = config.bool_("use_bias")
    rotation = parse_rotation(config, is_adjacent=True)
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        rotations=[rotation] * config.int_("num_hidden_layers"),
    )


ERNIE4_5 = Family(ERNIE4_5_DEFAULTS, _parts)
