"""Nemotron-H and Nemotron 3: each layer is Mamba-2, attention without rotation, a dense network or experts alone.

No network has a gate, and experts may read less than hidden states. transformers limits the times of prompts' tokens to
`time_step_min` and more; what the models were trained with doesn't, nor do we.
"""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, fields_of, gate, plain_parts
from raycore.models.granite_hybrid import check_time_limits
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.spec import Parts, Roots, TensorNames
from raycore.parts.experts.models import (
    ExpertNames,
    MoeSpec,
    SharedExperts,
    StackedNames,
    grouped_sigmoid_router,
    num_chosen,
    num_experts,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 131072,
    "intermediate_size": 21504,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_KEYS = {
    "layer_norm_epsilon": "rms_norm_eps",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}
"""What config.json calls what is called otherwise here, in other versions of it or in all families."""
_TYPES = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
"""What layers are called in `hybrid_override_pattern`, and in the first lists of types."""
_MIXERS = ("linear_attention", "full_attention")
_NAMES = TensorNames(
    before_attention="norm",
    before_feed_forward="norm",
    **{name: f"mixer.{name}_proj" for name in ("q", "k", "v", "o", "up", "down")},
    last_norm="norm_f",
    embed="embeddings",
    roots=Roots("backbone."),
    other_roots=[Roots()],
)
_EXPERT_NAMES = ExpertNames("mixer", stacked=StackedNames("mixer", "experts.up_proj", "experts.down_proj"))


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with a type for each layer, whose number follows from them."""
    config |= {ours: config[theirs] for theirs, ours in _KEYS.items() if theirs in config}
    fields = fields_of(config, _DEFAULTS)
    types = fields.list_("layers_block_type") or fields.list_("layer_types")
    if types is None:
        pattern = fields.get("hybrid_override_pattern")
        types = ["M", "E", "*", "-"] if pattern is None else list(str(pattern))
    return config | {
        "layer_types": [_TYPES.get(str(each), each) for each in types],
        "num_hidden_layers": len(types),
    }


def _parts(config: JsonFields) -> Parts:
    types = config.list_("layer_types") or []
    if "full_attention" not in types or any(each not in (*_MIXERS, "mlp", "moe") for each in types):
        raise config.error("layer_types", "a list of linear_attention, mlp, moe and at least one full_attention")
    for key in ("use_bias", "mamba_proj_bias"):
        if config.bool_(key):
            raise config.error(key, "false")
    if config.get("mamba_hidden_act") != "silu":
        raise config.error("mamba_hidden_act", "silu, which layers of Mamba-2 need")
    check_time_limits(config)
    has_bias, has_experts = config.bool_("mlp_bias"), "moe" in types
    if has_bias and has_experts:
        raise config.error("mlp_bias", "false in a model with experts")
    return plain_parts(
        config,
        qkv_bias=config.bool_("attention_bias"),
        o_bias=config.bool_("attention_bias"),
        mlp_bias=has_bias,
        gate=gate(config, "mlp_hidden_act"),
        is_gated=False,
        rotations=[None] * len(types),
        state=_state(config, [each == "linear_attention" for each in types]),
        parts_alone=["mixer" if each in _MIXERS else "feed_forward" for each in types],
        moe=_experts(config, [each == "moe" for each in types]) if has_experts else None,
        names=_NAMES,
    )


def _state(config: JsonFields, layers: list[bool]) -> Mamba2Spec | None:
    num_heads, num_groups = config.int_("mamba_num_heads"), config.int_("n_groups")
    if num_heads % num_groups:
        raise config.error("n_groups", f"a divisor of mamba_num_heads={num_heads}")
    return (
        Mamba2Spec(
            layers,
            num_v_heads=num_heads,
            k_dim=config.int_("ssm_state_size"),
            v_dim=config.int_("mamba_head_dim"),
            conv_size=config.int_("conv_kernel", low=2),
            num_groups=num_groups,
            has_conv_bias=config.bool_("use_conv_bias"),
            block="mixer",
            size_keys=("mamba_num_heads", "n_groups"),
        )
        if any(layers)
        else None
    )


def _experts(config: JsonFields, sparse: list[bool]) -> MoeSpec:
    key = "moe_shared_expert_intermediate_size"
    return MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("moe_intermediate_size"),
        sparse,
        grouped_sigmoid_router(config),
        SharedExperts(config.int_(key), size_key=key),
        _EXPERT_NAMES,
        is_gated=False,
        inner_size=config.optional_int("moe_latent_size"),
    )


NEMOTRON_H = Family(_DEFAULTS, _parts, _convert)
