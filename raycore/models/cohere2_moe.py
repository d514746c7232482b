"""Cohere 2 with experts: dense layers first, which may have another size, and the rotations of layers with windows."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.cohere2 import COHERE2_DEFAULTS, cohere_parts
from raycore.models.family import Family, fields_of, windows_by_type
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts
from raycore.parts.experts.models import ExpertChoice, MoeSpec, SharedExperts, num_chosen, num_experts

_DEFAULTS = {
    **COHERE2_DEFAULTS,
    "head_dim": 128,
    "layer_norm_eps": 1e-5,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_shared_experts": 0,
    "shared_expert_combination_strategy": "average",
    "expert_selection_fn": "softmax",
    "norm_topk_prob": True,
    "first_k_dense_replace": 0,
    "prefix_dense_sliding_window_pattern": 1,
}
_SIZE = "intermediate_size"
"""That of an expert in config.json. Of dense layers, the files have it under a name of its own."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the types of all layers, the size of dense ones and the norms' kind."""
    fields = fields_of(config, _DEFAULTS)
    num_layers, num_dense = fields.int_("num_hidden_layers"), fields.int_("first_k_dense_replace", low=0)
    patterns = fields.int_("prefix_dense_sliding_window_pattern"), fields.int_("sliding_window_pattern")
    layers = [(layer, patterns[0]) for layer in range(num_dense)]
    layers += [(layer, patterns[1]) for layer in range(num_layers - num_dense)]
    types = ["full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer, every in layers]
    size, has_rms = fields.int_(_SIZE), config.get("rms_norm_eps") is not None
    return config | {
        "layer_types": fields.list_("layer_types") or types,
        "mlp_layer_types": fields.list_("mlp_layer_types")
        or ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense),
        "moe_intermediate_size": size,
        _SIZE: fields.optional_int("prefix_dense_intermediate_size") or size,
        "norm": "rms" if has_rms else "layer",
        "rms_norm_eps": fields.float_("rms_norm_eps" if has_rms else "layer_norm_eps"),
    }


def _parts(config: JsonFields) -> Parts:
    types, num_layers = config.list_("mlp_layer_types") or [], config.int_("num_hidden_layers")
    if len(types) != num_layers or any(each not in ("dense", "sparse") for each in types):
        raise config.error(
            "mlp_layer_types", f"a list of {num_layers} entries (num_hidden_layers), each dense or sparse"
        )
    rotation, windows = parse_rotation(config, is_adjacent=True), windows_by_type(config)
    rotates_dense = config.int_("prefix_dense_sliding_window_pattern") == 1
    is_dense = [each == "dense" for each in types]
    return cohere_parts(
        config,
        norm="rms" if config.get("norm") == "rms" else "layer",
        layer_windows=windows,
        rotations=[
            rotation if window is not None or (rotates_dense and dense) else None
            for window, dense in zip(windows, is_dense, strict=True)
        ],
        moe=None if all(is_dense) else _experts(config, [not each for each in is_dense]),
    )


def _experts(config: JsonFields, sparse: list[bool]) -> MoeSpec:
    size, num_shared = config.int_("moe_intermediate_size"), config.int_("num_shared_experts", low=0)
    scores, combined = config.get("expert_selection_fn"), config.get("shared_expert_combination_strategy")
    if scores not in ("softmax", "sigmoid"):
        raise config.error("expert_selection_fn", "softmax or sigmoid")
    if combined not in ("average", "sum"):
        raise config.error("shared_expert_combination_strategy", "average or sum")
    router = (
        ExpertChoice("softmax_of_chosen")
        if scores == "softmax"
        else ExpertChoice("sigmoid", is_normalized=config.bool_("norm_topk_prob"))
    )
    shared = SharedExperts(size * num_shared, size_key=f"{_SIZE} times num_shared_experts") if num_shared else None
    return MoeSpec(
        num_experts(config),
        num_chosen(config),
        size,
        sparse,
        router,
        shared,
        size_key=f"{_SIZE} of an expert",
        multiplier=0.5 if num_shared and combined == "average" else 1.0,
    )


COHERE2_MOE = Family(_DEFAULTS, _parts, _convert)
