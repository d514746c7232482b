"""Bamba: layers of Mamba-2 among some with attention, in which half of each head is rotated."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, fields_of, plain_parts
from raycore.models.granite_hybrid import mamba2_layers
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_NAMES = TensorNames(
    before_feed_forward="pre_ff_layernorm",
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    last_norm="final_layernorm",
)


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with each layer's type, of which only those with attention are listed.

    How much of a head is rotated is only read with the other parameters of the rotation, as in transformers.
    """
    config = {key: value for key, value in config.items() if key != "partial_rotary_factor"}
    fields = fields_of(config, _DEFAULTS)
    full = fields.list_("attn_layer_indices") or []
    layers = range(fields.int_("num_hidden_layers"))
    types = ["full_attention" if layer in full else "linear_attention" for layer in layers]
    return config | {"layer_types": types}


def _parts(config: JsonFields) -> Parts:
    has_bias = config.bool_("attention_bias")
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=config.bool_("mlp_bias"),
        state=mamba2_layers(config),
        names=_NAMES,
    )


BAMBA = Family(_DEFAULTS, _parts, _convert)
