"""GLM-4.7-Flash: DeepSeek-V3 with other sizes, and a list of the layers that have experts."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.deepseek_v3 import latent_config, latent_parts, refuse_other_routers
from raycore.models.family import DEFAULTS, Family
from raycore.models.spec import Parts
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import grouped_sigmoid_router, sparse_by_type

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "rope_interleave": True,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def layers_with_experts(config: JsonFields) -> list[bool]:
    """Return for each layer whether it has experts. Without types, all after the first dense ones have some."""
    num_dense = config.optional_int("first_k_dense_replace", low=0)
    return sparse_by_type(config, 1 if num_dense is None else num_dense)


def _parts(config: JsonFields) -> Parts:
    refuse_other_routers(config)
    is_adjacent = config.bool_("rope_interleave")
    return latent_parts(
        config,
        grouped_sigmoid_router(config),
        is_adjacent=is_adjacent,
        sparse=layers_with_experts(config),
        mtp=MtpNames(),
    )


GLM4_MOE_LITE = Family(_DEFAULTS, _parts, latent_config)
