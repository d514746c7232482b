"""DeepSeek-V3 and R1, Moonlight, Kimi K2: latent attention, and experts in groups after some dense layers."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, plain_parts, predictors
from raycore.models.mixers.latent import latent_heads, latent_scale
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import (
    ExpertChoice,
    MoeSpec,
    SharedExperts,
    grouped_sigmoid_router,
    num_chosen,
    num_experts,
    sparse_after,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_interleave": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def latent_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the one key that is rotated, for all query heads, as the key-value head.

    All of this key is rotated. `partial_rotary_factor`, which some files have, is left out: it is of whole heads.
    """
    config = _without_fraction(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.get(key), dict):
            config[key] = _without_fraction(config[key])
    return {**config, "head_dim": config.get("qk_rope_head_dim", 64), "num_key_value_heads": 1}


def _without_fraction(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "partial_rotary_factor"}


def latent_parts(
    config: JsonFields,
    router: ExpertChoice,
    *,
    is_adjacent: bool,
    sparse: list[bool],
    mtp: MtpNames | None = None,
) -> Parts:
    """Return the parts of a model with latent attention and experts.

    Args:
        is_adjacent: whether rotated pairs are adjacent in the checkpoint.
        sparse: for each layer, whether it has experts.
        mtp: the tensors of the layers that predict further tokens. None: such layers aren't computed.
    """
    if config.get("moe_layer_freq") not in (None, 1):
        raise config.error("moe_layer_freq", "1: every layer after the dense ones has experts")
    heads, num_shared = latent_heads(config), config.optional_int("n_shared_experts", low=0)
    size = config.int_("moe_intermediate_size")
    shared = (
        SharedExperts(size * num_shared, size_key="moe_intermediate_size times n_shared_experts")
        if num_shared
        else None
    )
    experts = MoeSpec(num_experts(config), num_chosen(config), size, sparse, router, shared)
    has_bias = config.bool_("attention_bias")
    rotation = parse_rotation(config, is_adjacent=is_adjacent)
    return plain_parts(
        config,
        latent=heads,
        attention_scale=latent_scale(config, heads),
        rotations=[rotation] * config.int_("num_hidden_layers"),
        qkv_bias=has_bias,
        o_bias=has_bias,
        moe=experts if any(sparse) else None,
        **predictors(config, mtp),
    )


def refuse_other_routers(config: JsonFields) -> None:
    """Raise InvalidCheckpoint if config.json names another router than that of DeepSeek-V3."""
    check_known(config, {"scoring_func": "sigmoid", "topk_method": "noaux_tc"})


def _parts(config: JsonFields) -> Parts:
    refuse_other_routers(config)
    return latent_parts(
        config,
        grouped_sigmoid_router(config),
        is_adjacent=config.bool_("rope_interleave"),
        sparse=sparse_after(config, "first_k_dense_replace"),
        mtp=MtpNames(),
    )


DEEPSEEK_V3 = Family(_DEFAULTS, _parts, latent_config)
