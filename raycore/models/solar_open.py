"""Solar Open: Llama with the experts of GLM-4.5 in every layer."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts
from raycore.models.glm4_moe import grouped_experts
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 196608,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _parts(config: JsonFields) -> Parts:
    if config.get("first_k_dense_replace"):
        raise config.error("first_k_dense_replace", "0: every layer of this architecture has experts")
    if config.bool_("use_qk_norm"):
        raise config.error("use_qk_norm", "false: this architecture doesn't normalize heads")
    return plain_parts(
        config,
        qkv_bias=config.bool_("attention_bias"),
        moe=grouped_experts(config, [True] * config.int_("num_hidden_layers")),
    )


SOLAR_OPEN = Family(_DEFAULTS, _parts)
