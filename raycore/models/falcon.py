"""Falcon: attention and feed-forward part read the same layer norm, or one each, and neither has a gate.

A tensor has the rows of each key-value head: its query heads, its key and its value. Models with positions as a bias of
scores (ALiBi) are refused.
"""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, check_known, fields_of, ungated_parts
from raycore.models.spec import Parts, Roots, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_attention_heads": 71,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "multi_query": True,
    "parallel_attn": True,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "tie_word_embeddings": True,
}
_KEYS = {
    "layer_norm_epsilon": "rms_norm_eps",
    "activation": "hidden_act",
    "n_embed": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_head_kv": "num_kv_heads",
}
"""What config.json, or older versions of it, call what is called otherwise in all families."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the number of key-value heads, which it may only imply."""
    config = {ours: config[theirs] for theirs, ours in _KEYS.items() if config.get(theirs) is not None} | config
    fields = fields_of(config, _DEFAULTS)
    num_kv_heads = fields.optional_int("num_kv_heads") or fields.int_("num_attention_heads")
    if not fields.bool_("new_decoder_architecture"):
        num_kv_heads = 1 if fields.bool_("multi_query") else fields.int_("num_attention_heads")
    size = fields.optional_int("ffn_hidden_size") or 4 * fields.int_("hidden_size")
    return config | {"num_key_value_heads": num_kv_heads, "intermediate_size": size}


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"alibi": False})
    is_new, is_parallel = config.bool_("new_decoder_architecture"), config.bool_("parallel_attn")
    if is_new and not is_parallel:
        raise config.error("parallel_attn", "true with new_decoder_architecture")
    num_norms = config.optional_int("num_ln_in_parallel_attn") or (2 if is_new else 1)
    if num_norms > 2 or (num_norms == 2 and not is_new):
        raise config.error("num_ln_in_parallel_attn", "1, or 2 with new_decoder_architecture")
    before = ("ln_attn", "ln_mlp") if num_norms == 2 else ("input_layernorm",) * 2
    if not is_parallel:
        before = "input_layernorm", "post_attention_layernorm"
    return ungated_parts(
        config,
        **attention_biases(config, "bias"),
        mlp_bias=config.bool_("bias"),
        # one group's rows are all queries, the key and the value
        qkv_by_group=config.int_("num_key_value_heads") > 1,
        is_parallel=is_parallel,
        names=TensorNames(
            before_attention=before[0],
            before_feed_forward=before[1],
            qkv="self_attention.query_key_value",
            o="self_attention.dense",
            up="mlp.dense_h_to_4h",
            down="mlp.dense_4h_to_h",
            last_norm="ln_f",
            embed="word_embeddings",
            layer_list="h",
            roots=Roots("transformer."),
        ),
    )


FALCON = Family(_DEFAULTS, _parts, _convert)
