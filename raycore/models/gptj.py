"""GPT-J: attention, without biases, and a feed-forward part without a gate read the same layer norm. Rotated pairs are
adjacent, and the head has a bias.
"""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, fields_of, ungated_parts
from raycore.models.rotation import head_dim, parse_rotation, rotated_fraction
from raycore.models.spec import Parts, Roots, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 50400,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "hidden_act": "gelu_new",
    "rms_norm_eps": 1e-5,
    "rotary_dim": 64,
    "bos_token_id": 50256,
    "eos_token_id": 50256,
}
_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
}
"""What config.json calls what is called otherwise in all families."""
_NAMES = TensorNames(
    before_attention="ln_1",
    before_feed_forward="ln_1",
    q="attn.q_proj",
    k="attn.k_proj",
    v="attn.v_proj",
    o="attn.out_proj",
    up="mlp.fc_in",
    down="mlp.fc_out",
    last_norm="ln_f",
    embed="wte",
    layer_list="h",
    roots=Roots("transformer."),
)


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the feed-forward size, and the fraction of a head that is rotated."""
    config |= {ours: config[theirs] for theirs, ours in _KEYS.items() if theirs in config}
    fields = fields_of(config, _DEFAULTS)
    num_rotated, size = fields.int_("rotary_dim"), head_dim(fields)
    if num_rotated > size or num_rotated % 2:
        raise fields.error("rotary_dim", f"an even number, at most {size}, the components of a head")
    inner = fields.optional_int("n_inner") or 4 * fields.int_("hidden_size")
    return config | {
        "intermediate_size": inner,
        "num_key_value_heads": None,
        "partial_rotary_factor": rotated_fraction(num_rotated, size),
    }


def _parts(config: JsonFields) -> Parts:
    rotations = [parse_rotation(config, is_adjacent=True)] * config.int_("num_hidden_layers")
    return ungated_parts(config, mlp_bias=True, head_bias=True, rotations=rotations, is_parallel=True, names=_NAMES)


GPTJ = Family(_DEFAULTS, _parts, _convert)
