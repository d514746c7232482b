"""GPT-NeoX, of Pythia: layer norms and biases everywhere, no gates, and a quarter of each head is rotated.

A tensor has the rows of each head's query, key and value. The feed-forward part may read the hidden states before
attention, by a norm of its own.
"""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, ungated_parts
from raycore.models.spec import Parts, Roots, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 50432,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_hidden_layers": 44,
    "num_attention_heads": 64,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.25,
    "use_parallel_residual": True,
    "attention_bias": True,
    "bos_token_id": 0,
}
_KEYS = {"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}
"""What config.json calls what is called otherwise in all families."""
_NAMES = TensorNames(
    qkv="attention.query_key_value",
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    last_norm="final_layer_norm",
    embed="embed_in",
    roots=Roots("gpt_neox.", "embed_out"),
)


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    return config | {ours: config[theirs] for theirs, ours in _KEYS.items() if theirs in config}


def _parts(config: JsonFields) -> Parts:
    return ungated_parts(
        config,
        **attention_biases(config),
        mlp_bias=True,
        qkv_by_group=True,
        is_parallel=config.bool_("use_parallel_residual"),
        names=_NAMES,
    )


GPT_NEOX = Family(_DEFAULTS, _parts, _convert)
