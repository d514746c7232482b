"""GLM-4.5 to 4.7: Llama with experts after the first layers, and one shared expert. Half of each head is rotated."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts, predictors
from raycore.models.spec import Parts
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import (
    MoeSpec,
    SharedExperts,
    grouped_sigmoid_router,
    num_chosen,
    num_experts,
    sparse_after,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 151552,
    "intermediate_size": 10944,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}


def grouped_experts(config: JsonFields, sparse: list[bool]) -> MoeSpec | None:
    """Return experts in groups, and shared ones of the size of `n_shared_experts` of them. None: no layer has experts.

    `sparse`: for each layer, whether it has experts.
    """
    size = config.int_("moe_intermediate_size")
    shared = SharedExperts(
        size * config.int_("n_shared_experts"), size_key="moe_intermediate_size times n_shared_experts"
    )
    router = grouped_sigmoid_router(config)
    return MoeSpec(num_experts(config), num_chosen(config), size, sparse, router, shared) if any(sparse) else None


def _parts(config: JsonFields) -> Parts:
    return plain_parts(
        config,
        qkv_bias=config.bool_("attention_bias"),
        qk_norm="heads" if config.bool_("use_qk_norm") else None,
        moe=grouped_experts(config, sparse_after(config, "first_k_dense_replace")),
        **predictors(config, MtpNames()),
    )


GLM4_MOE = Family(_DEFAULTS, _parts)
