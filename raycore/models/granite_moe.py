"""Granite 3 with experts: Granite with experts in all layers, and in some models a network beside them."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family
from raycore.models.granite import GRANITE_DEFAULTS, granite_parts
from raycore.models.spec import Parts
from raycore.parts.experts.models import (
    ExpertChoice,
    ExpertNames,
    MoeSpec,
    SharedExperts,
    StackedNames,
    num_chosen,
    num_experts,
)

GRANITE_MOE_DEFAULTS = {**GRANITE_DEFAULTS, "num_local_experts": 8, "num_experts": 8, "num_experts_per_tok": 2}
_BLOCK = "block_sparse_moe"
_NAMES = ExpertNames(
    _BLOCK,
    router="router.layer",
    shared_gate_up="shared_mlp.input_linear",
    shared_down="shared_mlp.output_linear",
    stacked=StackedNames(_BLOCK, "input_linear.weight", "output_linear.weight"),
)


def granite_experts(config: JsonFields) -> MoeSpec:
    """Return the experts of all layers, and the network beside them, which `shared_intermediate_size` may say."""
    shared, key = config.optional_int("shared_intermediate_size", low=0), "shared_intermediate_size"
    return MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("intermediate_size"),
        [True] * config.int_("num_hidden_layers"),
        ExpertChoice("softmax_of_chosen"),
        SharedExperts(shared, size_key=key) if shared else None,
        _NAMES,
        size_key="intermediate_size",
    )


def _parts(config: JsonFields) -> Parts:
    return granite_parts(config, moe=granite_experts(config))


GRANITE_MOE = Family(GRANITE_MOE_DEFAULTS, _parts)
