"""Hunyuan 3 (Hy3): Qwen3 with experts after a dense layer, whose router has DeepSeek-V3's scores and no groups."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, plain_parts, predictors
from raycore.models.glm4_moe_lite import layers_with_experts
from raycore.models.spec import Parts
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import ExpertChoice, ExpertNames, MoeSpec, SharedExperts, num_chosen, num_experts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 120832,
    "intermediate_size": 13312,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 11158840.0,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "moe_intermediate_size": 1536,
    "router_scaling_factor": 2.826,
    "num_nextn_predict_layers": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NAMES = ExpertNames(router="router.gate", correction="expert_bias", shared="shared_mlp")


def _parts(config: JsonFields) -> Parts:
    if config.bool_("mlp_bias"):
        raise config.error("mlp_bias", "false: shared experts have no biases")
    size, sparse = config.int_("moe_intermediate_size"), layers_with_experts(config)
    router = ExpertChoice(
        "sigmoid",
        is_normalized=True,
        has_correction=True,
        scaling=config.float_("router_scaling_factor"),
        in_float32=True,
    )
    shared = SharedExperts(
        size * config.int_("num_shared_experts"), size_key="moe_intermediate_size times num_shared_experts"
    )
    experts = MoeSpec(num_experts(config), num_chosen(config), size, sparse, router, shared, _NAMES)
    return plain_parts(
        config,
        **attention_biases(config),
        qk_norm="heads",
        moe=experts if any(sparse) else None,
        **predictors(config, MtpNames()),
    )


HY_V3 = Family(_DEFAULTS, _parts)
