"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a shared expert with a gate."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts, windows_by_type
from raycore.models.spec import Parts
from raycore.parts.experts.models import (
    ExpertChoice,
    ExpertNames,
    MoeSpec,
    SharedExperts,
    num_chosen,
    num_experts,
    sparse_layers,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "qkv_bias": True,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _windows(config: JsonFields) -> list[int | None]:
    """Return the windows: without `layer_types`, every second one of the first `max_window_layers` has one."""
    num_layers = config.int_("num_hidden_layers")
    if not config.bool_("use_sliding_window"):
        return [None] * num_layers
    if config.list_("layer_types") is not None:
        return windows_by_type(config)
    window, end = config.optional_int("sliding_window"), config.int_("max_window_layers", low=0)
    return [window if layer < end and layer % 2 == 0 else None for layer in range(num_layers)]


def _parts(config: JsonFields) -> Parts:
    sparse = sparse_layers(config)
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("moe_intermediate_size"),
        sparse,
        ExpertChoice(is_normalized=config.bool_("norm_topk_prob")),
        SharedExperts(config.int_("shared_expert_intermediate_size"), has_gate=True),
        ExpertNames(shared="shared_expert"),
    )
    return plain_parts(
        config,
        qkv_bias=config.bool_("qkv_bias"),
        layer_windows=_windows(config),
        moe=experts if any(sparse) else None,
    )


QWEN2_MOE = Family(_DEFAULTS, _parts)
