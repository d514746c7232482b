"""Step 3.5 to 3.7 (the texts): more query heads in layers with windows, a gate for each head, and experts beside a
shared one after dense layers. The gates of some layers have limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.family import (
    DEFAULTS,
    Family,
    check_known,
    fields_of,
    plain_parts,
    predictors,
    rotations_by_type,
    sliding_layers,
    windows_by_type,
)
from raycore.models.mixers.attention import LayerHeads
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Gate, LayerGates, LimitedSilu, Parts, TensorNames
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import (
    ExpertChoice,
    ExpertNames,
    MoeSpec,
    SharedExperts,
    StackedNames,
    num_chosen,
    num_experts,
    sparse_by_type,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 128815,
    "intermediate_size": 11264,
    "num_hidden_layers": 45,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "num_experts": 288,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_router_scaling_factor": 1.0,
    "num_nextn_predict_layers": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_KEYS = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "num_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
}
"""What the authors' files call what transformers calls otherwise."""
_LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
"""Of layers. They may go on with the layers that predict further tokens."""
_KNOWN = {
    "gating": True,
    "use_head_wise_attn_gate": True,
    "use_bidirectional_attention": False,
    "mlp_bias": False,
    "sparse_attention_config": None,
}
_NUM_DENSE = 3
"""Without types, so many first layers have no experts."""
_NAMES = TensorNames(attention_gate="self_attn.g_proj")
_MTP = MtpNames(
    final_norms=("shared_head.norm", "transformer.shared_head.norm"),
    copies=("embed_tokens", "shared_head.head", "shared_head.output", "transformer.shared_head.output"),
    reads_normed=False,
)
_EXPERTS = ExpertNames(
    "moe",
    correction="router_bias",
    shared="share_expert",
    shared_is_in_block=False,
    stacked=StackedNames("moe", "gate_proj.weight", "down_proj.weight", "up_proj.weight"),
)


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, as transformers writes it."""
    config |= {ours: config[theirs] for theirs, ours in _KEYS.items() if config.get(theirs) is not None}
    fields = fields_of(config, _DEFAULTS)
    num_layers = fields.int_("num_hidden_layers")
    num_padded = num_layers + (fields.optional_int("num_nextn_predict_layers", low=0) or 0)
    for key in _LISTS:
        if len(fields.list_(key) or []) == num_padded:
            config[key], further = config[key][:num_layers], config[key][num_layers:]
            if further:
                config[f"mtp_{key}"] = further
    sparse = config.get("moe_layers_enum")
    if fields.list_("mlp_layer_types") is None and sparse is not None:
        of_experts = {int(each) for each in (sparse.split(",") if isinstance(sparse, str) else sparse) if str(each)}
        config["mlp_layer_types"] = ["sparse" if each in of_experts else "dense" for each in range(num_layers)]
    if config.get("num_sliding_attention_heads") is None and config.get("attention_other_setting"):
        config["num_sliding_attention_heads"] = fields.child("attention_other_setting").get("num_attention_heads")
    given = (config.get(key) for key in ("rope_theta", "rope_scaling", "partial_rotary_factors"))
    if config.get("rope_parameters") is None and any(given):
        config["rope_parameters"] = _rope_parameters(fields)
        config = {key: config[key] for key in config if key not in ("rope_theta", "rope_scaling")}
    return config


def _rope_parameters(config: JsonFields) -> Mapping[str, Any]:
    """Return the rotations of each type of layers, which files may list by layer. Only full attention is scaled."""
    types, theta = config.list_("layer_types") or ["full_attention"], config.get("rope_theta") or 10000.0
    fractions, found = config.list_("partial_rotary_factors"), dict[str, Any]()
    for layer, each in enumerate(types):
        if each in found:
            continue
        own: dict[str, Any] = {"rope_type": "default", "rope_theta": theta[layer] if isinstance(theta, list) else theta}
        if fractions is not None:
            own["partial_rotary_factor"] = fractions[layer]
        scaling = config.get("rope_scaling") if each == "full_attention" else None
        found[each] = own | (scaling or {})
    return found


def _parts(config: JsonFields) -> Parts:
    check_known(config, _KNOWN)
    has_bias, windows = config.bool_("attention_bias"), windows_by_type(config)
    query_scalar = config.optional_float("query_pre_attn_scalar")
    local = LayerHeads(
        num_heads=config.optional_int("num_sliding_attention_heads"), heads_key="num_sliding_attention_heads"
    )
    if local.num_heads is not None and local.num_heads % config.int_("num_key_value_heads"):
        expected = f"a multiple of num_key_value_heads={config.int_('num_key_value_heads')}"
        raise config.error("num_sliding_attention_heads", expected)
    return plain_parts(
        config,
        gate="silu",
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm="heads",
        norm_offset=1.0,
        attention_scale=None if query_scalar is None else query_scalar**-0.5,
        attention_gate="heads",
        layer_heads=[local if each else LayerHeads() for each in sliding_layers(config) or [False] * len(windows)],
        layer_windows=windows,
        rotations=rotations_by_type(config, parse_rotation(config, "sliding_attention")),
        layer_gates=_layer_gates(config),
        moe=_experts(config),
        names=_NAMES,
        **predictors(config, _further_layers(config)),
    )


def _further_layers(config: JsonFields) -> MtpNames | None:
    """Return the tensors of the layers that predict further tokens. None: they aren't alike, so they can't draft."""
    types, parts = config.list_("mtp_layer_types") or [], config.list_("mtp_mlp_layer_types") or []
    if len(set(types)) > 1 or len(set(parts)) > 1:
        return None
    return msgspec.structs.replace(_MTP, has_window="sliding_attention" in types, is_sparse="sparse" in parts)


def _layer_gates(config: JsonFields) -> list[LayerGates]:
    of_experts, dense = (_gates(config, key) for key in ("swiglu_limits", "swiglu_limits_shared"))
    return [LayerGates(*each) for each in zip(of_experts, dense, strict=True)]


def _gates(config: JsonFields, key: str) -> list[Gate]:
    """Return the gate of each layer. A limit of 0 or null is none."""
    num_layers, limits = config.int_("num_hidden_layers"), config.list_(key)
    if limits is None:
        return ["silu"] * num_layers
    if len(limits) != num_layers or not all(
        each is None or (type(each) in (int, float) and each >= 0) for each in limits
    ):
        raise config.error(key, f"a list of {num_layers} entries (num_hidden_layers), each null or a number from 0 on")
    return [LimitedSilu(float(each)) if each else "silu" for each in limits]


def _experts(config: JsonFields) -> MoeSpec | None:
    scaling = config.float_("moe_router_scaling_factor")
    router = ExpertChoice("sigmoid", is_normalized=True, has_correction=True, scaling=scaling)
    shared = SharedExperts(config.int_("share_expert_dim"), size_key="share_expert_dim")
    sparse, size = sparse_by_type(config, num_dense=_NUM_DENSE), config.int_("moe_intermediate_size")
    experts = MoeSpec(num_experts(config), num_chosen(config), size, sparse, router, shared, _EXPERTS)
    return experts if any(sparse) else None


STEP3P5 = Family(_DEFAULTS, _parts, _convert)
