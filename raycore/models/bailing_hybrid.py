"""Ling 3: five of six layers have Kimi's delta attention, and the others latent attention with a gate for each head.

Experts are those of DeepSeek-V3.
"""

from __future__ import annotations

from typing import Any

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.deepseek_v3 import latent_config, latent_parts
from raycore.models.family import DEFAULTS, Family, check_known, fields_of
from raycore.models.kimi_linear import OTHER_KEYS
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.state import state_layers
from raycore.models.spec import Parts, TensorNames
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import ExpertNames, grouped_sigmoid_router, sparse_layers

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 157184,
    "hidden_size": 2560,
    "intermediate_size": 6144,
    "num_hidden_layers": 42,
    "max_position_embeddings": 262144,
    "rope_theta": 6000000.0,
    "head_dim": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "short_conv_kernel_size": 4,
    "layer_group_size": 6,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "num_experts": 512,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "n_shared_experts": 1,
    "first_k_dense_replace": 2,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "bos_token_id": None,
    "eos_token_id": 156895,
}
_KNOWN = {
    "no_kda_lora": True,
    "gated_attention_proj_granularity_type": "head_wise",
    "rope_interleave": True,
    "moe_router_enable_expert_bias": True,
    "score_function": "sigmoid",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "hidden_act": "silu",
}
"""Settings that files have, and what they are in all of transformers' models."""
_LIMITS = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
"""What the gates of experts are limited to, by layer."""
_BLOCK = "attention"
_NAMES = TensorNames(q=f"{_BLOCK}.q_proj", o=f"{_BLOCK}.dense", embed="word_embeddings")
_EXPERT_NAMES = ExpertNames(correction="gate.expert_bias")


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the type of each layer and those without experts as lists."""
    config = {OTHER_KEYS.get(key, key): value for key, value in config.items()}
    fields = fields_of(config, _DEFAULTS)
    num_layers, every = fields.int_("num_hidden_layers"), fields.int_("layer_group_size")
    # transformers saves the size of a rotated key as that of a head
    config.setdefault("linear_head_dim", fields.int_("head_dim"))
    if fields.get("layer_types") is None:
        if num_layers % every:
            # such layers after the last group have attention in some code, and a state in other code
            raise fields.error("num_hidden_layers", f"a multiple of layer_group_size={every}, or layer_types")
        config["layer_types"] = [
            "linear_attention" if (layer + 1) % every else "full_attention" for layer in range(num_layers)
        ]
    types = fields.list_("mlp_layer_types")
    if types is None:
        types = ["dense"] * min(num_layers, fields.int_("first_k_dense_replace", low=0))
    config["mlp_only_layers"] = [layer for layer, each in enumerate(types) if each == "dense"]
    return latent_config(config)


def _parts(config: JsonFields) -> Parts:
    _check(config)
    head_dim = config.int_("linear_head_dim")
    state = KdaSpec(
        layers=state_layers(config),
        num_v_heads=config.int_("num_attention_heads"),
        k_dim=head_dim,
        v_dim=head_dim,
        conv_size=config.int_("short_conv_kernel_size", low=2),
        is_direct=True,
        least_decay=_least_decay(config) if config.bool_("kda_safe_gate") else None,
        block=_BLOCK,
    )
    router, sparse = grouped_sigmoid_router(config), sparse_layers(config)
    parts = latent_parts(config, router, is_adjacent=True, sparse=sparse, mtp=MtpNames())
    assert parts.latent is not None, "such parts have it"
    return msgspec.structs.replace(
        parts,
        latent=msgspec.structs.replace(parts.latent, block=_BLOCK, has_gate=True),
        state=state,
        moe=None if parts.moe is None else msgspec.structs.replace(parts.moe, names=_EXPERT_NAMES),
        names=_NAMES,
    )


def _check(config: JsonFields) -> None:
    """Raise InvalidCheckpoint if config.json says that the model computes something else than is computed here."""
    check_known(config, _KNOWN)
    for key in _LIMITS:
        if config.get(key) and any(config.list_(key) or []):
            raise config.error(key, "none, or 0 for every layer, because gates with a limit aren't supported")
    size, num_shared = config.int_("moe_intermediate_size"), config.optional_int("n_shared_experts", low=0) or 0
    # of one shared expert, or of all
    if config.get("moe_shared_expert_intermediate_size") not in (None, size, size * num_shared):
        expected = f"moe_intermediate_size={size}, or that times the number of shared experts, {num_shared}"
        raise config.error("moe_shared_expert_intermediate_size", expected)


def _least_decay(config: JsonFields) -> float:
    value = config.get("kda_lower_bound")
    if type(value) not in (int, float) or not value < 0:
        raise config.error("kda_lower_bound", "a negative number")
    return float(value)


BAILING_HYBRID = Family(_DEFAULTS, _parts, _convert)
