"""K-EXAONE: EXAONE 4 with norms before the blocks, and experts in groups with shared ones after the first layers."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.exaone4 import EXAONE4_DEFAULTS, local_rotations, windows
from raycore.models.family import Family, plain_parts
from raycore.models.spec import Parts
from raycore.parts.experts.models import (
    ExpertNames,
    MoeSpec,
    SharedExperts,
    grouped_sigmoid_router,
    num_chosen,
    num_experts,
    sparse_by_type,
)

_DEFAULTS = {
    **EXAONE4_DEFAULTS,
    "first_k_dense_replace": 1,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 1,
    "eos_token_id": 53,
}
_NAMES = ExpertNames(correction="e_score_correction_bias")


def _parts(config: JsonFields) -> Parts:
    return plain_parts(
        config,
        qk_norm="heads",
        layer_windows=windows(config),
        rotations=local_rotations(config),
        moe=_experts(config),
    )


def _experts(config: JsonFields) -> MoeSpec | None:
    sparse = sparse_by_type(config, num_dense=config.int_("first_k_dense_replace", low=0))
    size, router = config.int_("moe_intermediate_size"), grouped_sigmoid_router(config)
    shared = SharedExperts(
        size * config.int_("num_shared_experts"), size_key="moe_intermediate_size times num_shared_experts"
    )
    experts = MoeSpec(num_experts(config), num_chosen(config), size, sparse, router, shared, _NAMES)
    return experts if any(sparse) else None


EXAONE_MOE = Family(_DEFAULTS, _parts)
