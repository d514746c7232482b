"""Laguna: layers with different numbers of query heads, gates of attention, and experts with a shared one."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, plain_parts, rotations_by_type, windows_by_type
from raycore.models.mixers.attention import LayerHeads
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts, TensorNames
from raycore.parts.experts.models import (
    ExpertChoice,
    ExpertNames,
    MoeSpec,
    SharedExperts,
    num_chosen,
    num_experts,
    sparse_by_type,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 100352,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 40,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "gating": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
    },
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "moe_routed_scaling_factor": 1.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_KNOWN = {"moe_apply_router_weight_on_input": False, "moe_router_logit_softcapping": 0.0}
_HEADS = "num_attention_heads_per_layer"
_NAMES = TensorNames(attention_gate="self_attn.g_proj")
_EXPERTS = ExpertNames(correction="experts.e_score_correction_bias", shared="shared_expert")


def _layer_heads(config: JsonFields) -> list[LayerHeads]:
    num_layers, num_kv_heads = config.int_("num_hidden_layers"), config.int_("num_key_value_heads")
    nums = config.list_(_HEADS) or [config.int_("num_attention_heads")] * num_layers
    if len(nums) != num_layers or any(type(num) is not int or num < 1 or num % num_kv_heads for num in nums):
        raise config.error(_HEADS, f"{num_layers} multiples (num_hidden_layers) of num_key_value_heads={num_kv_heads}")
    return [LayerHeads(num_heads=num, heads_key=_HEADS) for num in nums]


def _parts(config: JsonFields) -> Parts:
    check_known(config, _KNOWN)
    gates = {True: "heads", "per-head": "heads", "per-element": "elements"}
    gating, has_bias = config.get("gating"), config.bool_("attention_bias")
    if gating not in gates:
        raise config.error("gating", "true, per-head or per-element")
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm="heads",
        attention_gate=gates[gating],
        attention_gate_by="softplus",
        layer_heads=_layer_heads(config),
        layer_windows=windows_by_type(config),
        rotations=rotations_by_type(config, parse_rotation(config, "sliding_attention")),
        moe=_experts(config),
        names=_NAMES,
    )


def _experts(config: JsonFields) -> MoeSpec | None:
    scaling = config.float_("moe_routed_scaling_factor")
    router = ExpertChoice("sigmoid", is_normalized=True, has_correction=True, scaling=scaling)
    shared = SharedExperts(config.int_("shared_expert_intermediate_size"))
    sparse, size = sparse_by_type(config, num_dense=1), config.int_("moe_intermediate_size")
    experts = MoeSpec(num_experts(config), num_chosen(config), size, sparse, router, shared, _EXPERTS)
    return experts if any(sparse) else None


LAGUNA = Family(_DEFAULTS, _parts)
