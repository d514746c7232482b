"""Bamba: layers of Mamba-2 among some with attention, in which half of each head is rotated."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, biases, fields_of, plain_parts
from raycore.models.granite_hybrid import MAMBA2_DEFAULTS, mamba2_layers
from raycore.models.spec import Parts, TensorNames

BAMBA_DEFAULTS = {
    **DEFAULTS,
    **MAMBA2_DEFAULTS,
    "vocab_size": 128000,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
BAMBA_NAMES = TensorNames(
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
    fields = fields_of(config, BAMBA_DEFAULTS)
    full = fields.list_("attn_layer_indices") or []
    layers = range(fields.int_("num_hidden_layers"))
    types = ["full_attention" if layer in full else "linear_attention" for layer in layers]
    return config | {"layer_types": types}


def _parts(config: JsonFields) -> Parts:
    return plain_parts(
        config,
        **biases(config),
        state=mamba2_layers(config),
        names=BAMBA_NAMES,
    )


BAMBA = Family(BAMBA_DEFAULTS, _parts, _convert)
