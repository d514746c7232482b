"""Mistral Small 4: DeepSeek-V3 whose router has probabilities of all experts, and whose queries grow with position."""

from __future__ import annotations

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.deepseek_v3 import latent_config, latent_parts
from raycore.models.family import DEFAULTS, Family
from raycore.models.ministral3 import query_scale
from raycore.models.spec import Parts
from raycore.parts.experts.models import ExpertChoice, check_groups, sparse_after

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 131072,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "max_position_embeddings": 1048576,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}


def _parts(config: JsonFields) -> Parts:
    num_groups, num_chosen_groups = check_groups(config)
    router = ExpertChoice(
        is_normalized=config.bool_("norm_topk_prob"),
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        scaling=config.float_("routed_scaling_factor"),
    )
    sparse = sparse_after(config, "first_k_dense_replace")
    parts = latent_parts(config, router, is_adjacent=config.bool_("rope_interleave"), sparse=sparse)
    return msgspec.structs.replace(parts, query_scale=query_scale(config))


MISTRAL4 = Family(_DEFAULTS, _parts, latent_config)
