"""Helium: Llama whose rotated pairs are adjacent."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, plain_parts
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 48000,
    "hidden_size": 2560,
    "intermediate_size": 7040,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-8,
    "rope_theta": 100000.0,
}


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"attention_bias": False, "mlp_bias": False})
    rotations = [parse_rotation(config, is_adjacent=True)] * config.int_("num_hidden_layers")
    return plain_parts(config, rotations=rotations)


HELIUM = Family(_DEFAULTS, _parts)
