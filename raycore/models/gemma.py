"""Gemma and CodeGemma: Llama with norms whose weights lack 1, GELU, and embeddings that are multiplied."""

from __future__ import annotations

import math

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, gate, plain_parts
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"use_bidirectional_attention": False})
    has_bias, activation = config.bool_("attention_bias"), gate(config)
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        # the first files say gelu, and the models were trained with its approximation
        gate="gelu_tanh" if activation == "gelu" else activation,
        norm_offset=1.0,
        embedding_multiplier=math.sqrt(config.int_("hidden_size")),
        rounds_embedding_multiplier=True,
    )


GEMMA = Family(_DEFAULTS, _parts)
