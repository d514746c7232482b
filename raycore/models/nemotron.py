"""Nemotron 4 and Minitron, and Jais 2: layer norms, and no gates: the activation is the square of what is above 0.

The weights of Nemotron's norms lack 1, and half of each head is rotated.
"""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, biases, norm_eps_at, ungated_parts
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 256000,
    "hidden_size": 6144,
    "intermediate_size": 24576,
    "num_attention_heads": 48,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "bos_token_id": 2,
    "eos_token_id": 3,
}
_JAIS2_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 150272,
    "hidden_size": 3328,
    "intermediate_size": 26624,
    "num_attention_heads": 26,
    "max_position_embeddings": 8192,
    "partial_rotary_factor": 1.0,
    "attention_bias": True,
    "mlp_bias": True,
    "bos_token_id": 0,
    "eos_token_id": 150024,
}


def _parts(config: JsonFields) -> Parts:
    return ungated_parts(config, **biases(config), norm_offset=1.0)


def _jais2_parts(config: JsonFields) -> Parts:
    return ungated_parts(config, **biases(config))


NEMOTRON = Family(_DEFAULTS, _parts, norm_eps_at("norm_eps"))
JAIS2 = Family(_JAIS2_DEFAULTS, _jais2_parts, norm_eps_at("layer_norm_eps"))
