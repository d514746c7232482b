"""DeepSeek-V3.2: DeepSeek-V3 whose attention sees the tokens that an indexer selects."""

from __future__ import annotations

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.deepseek_v3 import DEEPSEEK_V3, latent_config, latent_parts, refuse_other_routers
from raycore.models.family import Family, check_known
from raycore.models.glm4_moe_lite import layers_with_experts
from raycore.models.mixers.selecting import parse_indexer
from raycore.models.spec import Parts
from raycore.parts.experts.models import grouped_sigmoid_router

_DEFAULTS = {
    **DEEPSEEK_V3.defaults,
    "max_position_embeddings": 163840,
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 64,
}


def selecting_parts(config: JsonFields, *, is_adjacent: bool, shared: list[bool] | None = None) -> Parts:
    """Return the parts of a model with latent attention to selected tokens, and experts.

    Args:
        is_adjacent: whether pairs that the indexer rotates are adjacent in the checkpoint. Those of attention are.
        shared: as `Indexer.shared`. None: all layers have an indexer.
    """
    refuse_other_routers(config)
    known = {"indexer_rope_interleave": is_adjacent, "rope_interleave": True, "mlp_bias": False}
    check_known(config, known | {"scoring_func": "sigmoid"})
    if any(each != "indexed_attention" for each in config.list_("layer_types") or []):
        raise config.error("layer_types", "indexed_attention for every layer")
    sparse = layers_with_experts(config)
    parts = latent_parts(config, grouped_sigmoid_router(config), is_adjacent=True, sparse=sparse)
    return msgspec.structs.replace(parts, indexer=parse_indexer(config, is_adjacent=is_adjacent, shared=shared))


def _parts(config: JsonFields) -> Parts:
    return selecting_parts(config, is_adjacent=False)


DEEPSEEK_V32 = Family(_DEFAULTS, _parts, latent_config)
