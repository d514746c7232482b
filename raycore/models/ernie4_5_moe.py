"""ERNIE 4.5 with experts: corrected probabilities choose them, and there are shared ones."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.ernie4_5 import ERNIE4_5_DEFAULTS
from raycore.models.family import Family, plain_parts, predictors
from raycore.models.layer_part import ROWS
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import ExpertChoice, ExpertNames, MoeSpec, SharedExperts, num_chosen, num_experts

_DEFAULTS = {
    **ERNIE4_5_DEFAULTS,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "head_dim": None,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1536,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
_KEYS = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}
"""Names of the same settings elsewhere, by those in config.json."""
_NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias")
_MTP = MtpNames(
    layer="model.mtp_block.{}.",
    others="model.",
    embedding_norm="mtp_emb_norm.{}",
    hidden_norm="mtp_hidden_norm.{}",
    projection="mtp_linear_proj.{}",
    final_norms=(),
    copies=(),
    reads_normed=False,
    is_sparse=False,
)


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    return {_KEYS.get(key, key): value for key, value in config.items()}


def _sparse(config: JsonFields) -> list[bool]:
    """Return for each layer whether it has experts: every `moe_layer_interval`-th one from the first to the last."""
    num_layers, every = config.int_("num_hidden_layers"), config.int_("moe_layer_interval")
    first, last = config.int_("moe_layer_start_index", low=0), config.int_("moe_layer_end_index", low=-1)
    last = num_layers - 1 if last == -1 else last
    return [(layer + 1) % every == 0 and first <= layer <= last for layer in range(num_layers)]


def _parts(config: JsonFields) -> Parts:
    if config.bool_("use_bias"):
        raise config.error("use_bias", "false: experts and the head have no biases")
    size, sparse = config.int_("moe_intermediate_size"), _sparse(config)
    num_shared = config.optional_int("moe_num_shared_experts", low=0)
    shared = SharedExperts(size * (num_shared or 1), size_key="moe_intermediate_size times moe_num_shared_experts")
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        size,
        sparse,
        ExpertChoice(is_normalized=True, has_correction=True, in_float32=True),
        shared if num_shared else None,
        _NAMES,
        correction_shape=(1, ROWS),
    )
    rotation = parse_rotation(config, is_adjacent=True)
    return plain_parts(
        config,
        rotations=[rotation] * config.int_("num_hidden_layers"),
        moe=experts if any(sparse) else None,
        **predictors(config, _MTP),
    )


ERNIE4_5_MOE = Family(_DEFAULTS, _parts, _convert)
