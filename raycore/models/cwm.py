"""Code World Model: Llama with windows in three of four layers."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, plain_parts, sliding_layers
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 128256,
    "hidden_size": 6144,
    "intermediate_size": 21504,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
    "sliding_window": 8192,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"attention_bias": False, "mlp_bias": False})
    window, given = config.optional_int("sliding_window"), sliding_layers(config)
    sliding = [layer % 4 != 0 for layer in range(config.int_("num_hidden_layers"))] if given is None else given
    return plain_parts(config, layer_windows=[window if each else None for each in sliding])


CWM = Family(_DEFAULTS, _parts)
