"""Phi-1, Phi-1.5 and Phi-2: attention and feed-forward part read the same layer norm, and everything has a bias."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, norm_eps_at, ungated_parts
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 51200,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "hidden_act": "gelu_new",
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}
_NAMES = TensorNames(
    before_feed_forward="input_layernorm",
    o="self_attn.dense",
    up="mlp.fc1",
    down="mlp.fc2",
    last_norm="final_layernorm",
)


def _parts(config: JsonFields) -> Parts:
    biases = dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias", "head_bias"), True)
    return ungated_parts(config, **biases, is_parallel=True, names=_NAMES)


PHI = Family(_DEFAULTS, _parts, norm_eps_at("layer_norm_eps"), only={"qk_layernorm": False})
