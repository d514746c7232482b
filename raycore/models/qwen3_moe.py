"""Qwen3-MoE: Qwen3 with experts."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, attention_biases, plain_parts, same_window
from raycore.models.qwen2 import QWEN2_DEFAULTS
from raycore.models.spec import Parts
from raycore.parts.experts.models import ExpertChoice, MoeSpec, num_chosen, num_experts, sparse_layers

_DEFAULTS = {
    **QWEN2_DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}


def _parts(config: JsonFields) -> Parts:
    sparse = sparse_layers(config)
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("moe_intermediate_size"),
        sparse,
        ExpertChoice(is_normalized=config.bool_("norm_topk_prob")),
    )
    return plain_parts(
        config,
        **attention_biases(config),
        qk_norm="heads",
        layer_windows=same_window(config) if config.bool_("use_sliding_window") else [None] * len(sparse),
        moe=experts if any(sparse) else None,
    )


QWEN3_MOE = Family(_DEFAULTS, _parts)
