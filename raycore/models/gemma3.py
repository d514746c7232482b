"""Gemma 3, text: norms on both sides of the blocks, whose weights lack 1, GELU, and windows in five of six layers."""

from __future__ import annotations

import math

from raycore.checkpoint.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, gate, plain_parts, rotations_by_type, windows_by_type
from raycore.models.rotation import Rotation
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 256,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_NAMES = TensorNames(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_feedforward_layernorm",
    after_feed_forward="post_feedforward_layernorm",
)


def _parts(config: JsonFields) -> Parts:
    if config.bool_("use_bidirectional_attention"):
        raise config.error("use_bidirectional_attention", "false")
    has_bias, every = config.bool_("attention_bias"), config.int_("sliding_window_pattern")
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm="heads",
        norm_offset=1.0,
        gate=gate(config, "hidden_activation"),
        layer_windows=windows_by_type(config, full_every=every),
        rotations=rotations_by_type(config, Rotation(config.float_("rope_local_base_freq")), full_every=every),
        attention_scale=config.float_("query_pre_attn_scalar") ** -0.5,
        embedding_multiplier=math.sqrt(config.int_("hidden_size")),
        attention_softcap=config.optional_float("attn_logit_softcapping"),
        logits_softcap=config.optional_float("final_logit_softcapping"),
        names=_NAMES,
    )


GEMMA3 = Family(_DEFAULTS, _parts)
