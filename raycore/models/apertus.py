"""Apertus: norms of query and key heads, and a feed-forward part without a gate, whose activation has weights."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, check_known, plain_parts
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 131072,
    "intermediate_size": 14336,
    "hidden_act": "xielu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-5,
    "rope_theta": 12e6,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 12e6,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}
_NAMES = TensorNames(before_attention="attention_layernorm", before_feed_forward="feedforward_layernorm")
_KNOWN = {"hidden_act": "xielu", "qk_norm": True, "post_norm": False, "mlp_bias": False}


def _parts(config: JsonFields) -> Parts:
    check_known(config, _KNOWN)
    return plain_parts(
        config,
        **attention_biases(config),
        qk_norm="heads",
        gate="silu",
        is_gated=False,
        dense="xielu",
        names=_NAMES,
    )


APERTUS = Family(_DEFAULTS, _parts)
