"""Qwen3-Next and Qwen3.5, text: three of four layers have the gated delta rule, and the others attention with a gate of
its output. Norms' weights lack 1, except in the former.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, plain_parts
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.state import state_layers
from raycore.models.spec import Parts
from raycore.parts.drafts.models import MtpNames
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
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
_MTP = MtpNames(
    layer="mtp.layers.{}.",
    others="mtp.",
    embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden",
    projection="fc",
    final_norms=("norm",),
    copies=(),
)
_QWEN3_NEXT_DEFAULTS = {**_DEFAULTS, "vocab_size": 151936, "num_experts": 512, "num_experts_per_tok": 10}
_QWEN3_5_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
_QWEN3_5_MOE_DEFAULTS = {
    **_DEFAULTS,
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}


def _parts(config: JsonFields, *, is_interleaved: bool, **parts: Any) -> Parts:
    num_k_heads, num_v_heads = config.int_("linear_num_key_heads"), config.int_("linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads={num_k_heads}")
    if config.get("hidden_act") != "silu":
        raise config.error("hidden_act", "silu, which layers with the delta rule need")
    return plain_parts(
        config,
        **attention_biases(config),
        qk_norm="heads",
        norm_offset=1.0,
        attention_gate="query_rows",
        state=DeltaSpec(
            layers=state_layers(config, config.int_("full_attention_interval")),
            num_k_heads=num_k_heads,
            num_v_heads=num_v_heads,
            k_dim=config.int_("linear_key_head_dim"),
            v_dim=config.int_("linear_value_head_dim"),
            conv_size=config.int_("linear_conv_kernel_dim", low=2),
            is_interleaved=is_interleaved,
        ),
        **_predictors(config),
        **parts,
    )


def _predictors(config: JsonFields) -> dict[str, Any]:
    """Return the parts that predict further tokens: one layer, unless config.json says something else."""
    num = config.optional_int("mtp_num_hidden_layers", low=0)
    num = 1 if num is None else num
    # with an embedding of its own, the layer would draft from other inputs
    can_draft = num > 0 and not config.bool_("mtp_use_dedicated_embeddings")
    return {"num_predictors": num, "mtp": _MTP if can_draft else None}


def _experts(config: JsonFields, sparse: list[bool], *, is_normalized: bool) -> MoeSpec | None:
    if not any(sparse):
        return None
    return MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("moe_intermediate_size"),
        sparse,
        ExpertChoice(is_normalized=is_normalized),
        SharedExperts(config.int_("shared_expert_intermediate_size"), has_gate=True),
        ExpertNames(shared="shared_expert"),
    )


def _qwen3_next_parts(config: JsonFields) -> Parts:
    sparse = sparse_layers(config) if config.get("num_experts") else [False] * config.int_("num_hidden_layers")
    moe = _experts(config, sparse, is_normalized=config.bool_("norm_topk_prob"))
    return _parts(config, is_interleaved=True, moe=moe)


def _qwen3_5_moe_parts(config: JsonFields) -> Parts:
    sparse = [True] * config.int_("num_hidden_layers")
    return _parts(config, is_interleaved=False, moe=_experts(config, sparse, is_normalized=True))


QWEN3_NEXT = Family(_QWEN3_NEXT_DEFAULTS, _qwen3_next_parts)
QWEN3_5 = Family(_QWEN3_5_DEFAULTS, partial(_parts, is_interleaved=False))
QWEN3_5_MOE = Family(_QWEN3_5_MOE_DEFAULTS, _qwen3_5_moe_parts)
