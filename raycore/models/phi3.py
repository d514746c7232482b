"""Phi-3, Phi-4 and Phi-4-mini: Llama whose projections share tensors."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts, same_window
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
}
_NAMES = TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj")


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, layer_windows=same_window(config), names=_NAMES)


PHI3 = Family(_DEFAULTS, _parts)
