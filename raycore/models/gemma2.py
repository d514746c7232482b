"""Gemma 2: norms on both sides of the blocks, whose weights lack 1, GELU, windows in every other layer, and caps of
attention scores and logits.
"""

from __future__ import annotations

import math
from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, gate, plain_parts, windows_by_type
from raycore.models.spec import Parts, TensorNames

GEMMA_DEFAULTS = {
    **DEFAULTS,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "query_pre_attn_scalar": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_DEFAULTS = {
    **GEMMA_DEFAULTS,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "sliding_window_pattern": 2,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
_NAMES = TensorNames(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


def gemma_parts(config: JsonFields, names: TensorNames = _NAMES, **parts: Any) -> Parts:
    """Return the parts of Gemma 2, and `parts`, which it doesn't have. `names`: for a family that has other norms."""
    if config.bool_("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "false")
    has_bias = config.bool_("attention_bias")
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        norm_offset=1.0,
        gate=gate(config, "hidden_activation"),
        layer_windows=windows_by_type(config, full_every=config.int_("sliding_window_pattern")),
        attention_scale=config.float_("query_pre_attn_scalar") ** -0.5,
        attention_softcap=config.optional_float("attn_logit_softcapping"),
        embedding_multiplier=math.sqrt(config.int_("hidden_size")),
        rounds_embedding_multiplier=True,
        logits_softcap=config.optional_float("final_logit_softcapping"),
        names=names,
        **parts,
    )


GEMMA2 = Family(_DEFAULTS, gemma_parts)
