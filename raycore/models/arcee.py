"""Arcee's AFM: Llama without gates, whose activation is the square of what is above 0."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, biases, plain_parts
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "hidden_act": "relu2",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, **biases(config), is_gated=False)


ARCEE = Family(_DEFAULTS, _parts)
