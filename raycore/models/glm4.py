"""GLM-4 (`GlmForCausalLM`) and GLM-4-0414 (`Glm4ForCausalLM`): half of each head is rotated, by adjacent pairs. The
latter has norms after the blocks, too."""

from __future__ import annotations

from functools import partial

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 151552,
    "intermediate_size": 13696,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "bos_token_id": None,
    "eos_token_id": [151329, 151336, 151338],
}
_GLM_NAMES = TensorNames(gate_up="mlp.gate_up_proj")
_GLM4_NAMES = TensorNames(
    gate_up="mlp.gate_up_proj", after_attention="post_self_attn_layernorm", after_feed_forward="post_mlp_layernorm"
)


def _parts(config: JsonFields, names: TensorNames) -> Parts:
    rotation = parse_rotation(config, is_adjacent=True)
    rotations = [rotation] * config.int_("num_hidden_layers")
    return plain_parts(config, qkv_bias=config.bool_("attention_bias"), rotations=rotations, names=names)


GLM = Family(_DEFAULTS, partial(_parts, names=_GLM_NAMES))
GLM4 = Family(_DEFAULTS, partial(_parts, names=_GLM4_NAMES))
