"""Ministral 3: Mistral with YaRN, whose queries grow with their position."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, plain_parts, same_window
from raycore.models.mistral import MISTRAL_DEFAULTS
from raycore.models.rotation import rope_parameters
from raycore.models.spec import Parts, QueryScale

_DEFAULTS = {
    **MISTRAL_DEFAULTS,
    "vocab_size": 131072,
    "num_hidden_layers": 34,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}


def query_scale(config: JsonFields) -> QueryScale | None:
    """Return how queries grow with their position."""
    rope = rope_parameters(config)
    growth = rope.strength("llama_4_scaling_beta")
    return None if not growth else QueryScale(growth, rope.int_("original_max_position_embeddings"))


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, layer_windows=same_window(config), query_scale=query_scale(config))


MINISTRAL3 = Family(_DEFAULTS, _parts)
