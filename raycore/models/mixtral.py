"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, plain_parts, same_window
from raycore.models.mistral import MISTRAL_DEFAULTS
from raycore.models.spec import Parts
from raycore.parts.experts.models import ExpertChoice, ExpertNames, MoeSpec, num_chosen, num_experts, sparse_layers

_DEFAULTS = {
    **MISTRAL_DEFAULTS,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def _parts(config: JsonFields) -> Parts:
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("intermediate_size"),
        sparse_layers(config),
        ExpertChoice(is_normalized=True),
        names=ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
        size_key="intermediate_size",
    )
    return plain_parts(config, layer_windows=same_window(config), moe=experts)


MIXTRAL = Family(_DEFAULTS, _parts)
