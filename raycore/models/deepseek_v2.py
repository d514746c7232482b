"""DeepSeek-V2: DeepSeek-V3 whose router has probabilities of all experts, and compares groups by their best one."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.deepseek_v3 import latent_config, latent_parts
from raycore.models.family import DEFAULTS, Family
from raycore.models.spec import Parts
from raycore.parts.experts.models import ExpertChoice, check_groups, sparse_after

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts": 64,
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "topk_method": "greedy",
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 0,
}


def _router(config: JsonFields) -> ExpertChoice:
    if config.get("scoring_func") not in (None, "softmax"):
        raise config.error("scoring_func", "softmax")
    if config.get("norm_topk_prob"):
        raise config.error("norm_topk_prob", "false")
    num_groups = num_chosen_groups = 1
    if config.get("topk_method") == "group_limited_greedy":
        num_groups, num_chosen_groups = check_groups(config)
    elif config.get("topk_method") != "greedy":
        raise config.error("topk_method", "greedy or group_limited_greedy")
    return ExpertChoice(
        num_groups=num_groups,
        num_chosen_groups=num_chosen_groups,
        num_compared=1,
        scaling=config.float_("routed_scaling_factor"),
        in_float32=True,
    )


def _parts(config: JsonFields) -> Parts:
    sparse = sparse_after(config, "first_k_dense_replace")
    return latent_parts(config, _router(config), is_adjacent=True, sparse=sparse)


DEEPSEEK_V2 = Family(_DEFAULTS, _parts, latent_config)
