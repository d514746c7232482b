"""MiniMax-M3's texts: attention to selected blocks of tokens, and experts beside a shared one in some layers."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, fields_of, plain_parts
from raycore.models.mixers.block_selecting import parse_block_indexer
from raycore.models.rotation import head_dim, parse_minimax_rotation
from raycore.models.spec import ClampedSwiglu, Parts
from raycore.parts.experts.models import (
    ExpertChoice,
    ExpertNames,
    MoeSpec,
    SharedExperts,
    num_chosen,
    num_experts,
    sparse_by_type,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 200064,
    "hidden_size": 6144,
    "intermediate_size": 3072,
    "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072,
    "num_hidden_layers": 60,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "rotary_dim": 64,
    "max_position_embeddings": 524288,
    "rope_theta": 5e6,
    "num_experts": 128,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.0,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "index_block_size": 128,
    "index_topk_blocks": 16,
    "index_local_blocks": 1,
    "bos_token_id": 200034,
    "eos_token_id": 200020,
}
_OLD_KEYS = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""Those of `sparse_attention_config`, and what they are called without it."""
_TYPES = ("full_attention", "minimax_m3_sparse")
_KNOWN = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_head",
    "use_gemma_norm": True,
    "attention_output_gate": False,
}
_KNOWN_OF_SELECTION = {"use_sparse_attention": True, "sparse_init_block": 0, "sparse_score_type": "max"}
_EXPERTS = ExpertNames("block_sparse_moe", "w1", "w3", "w2", correction="e_score_correction_bias")


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the sizes and the layers that select blocks where transformers has them, and
    the sizes of dense layers and of experts under Llama's keys."""
    fields = fields_of(config, _DEFAULTS)
    old = fields.child("sparse_attention_config")
    converted = config | {key: old.get(name) for name, key in _OLD_KEYS.items() if old.get(name) is not None}
    selects, experts = old.list_("sparse_attention_freq"), fields.list_("moe_layer_freq")
    if config.get("layer_types") is None and selects is not None:
        converted["layer_types"] = [_TYPES[bool(each)] for each in selects]
    if config.get("mlp_layer_types") is None and experts is not None:
        converted["mlp_layer_types"] = ["sparse" if each else "dense" for each in experts]
    size = fields.int_("intermediate_size")
    return converted | {"moe_intermediate_size": size, "intermediate_size": fields.int_("dense_intermediate_size")}


def _parts(config: JsonFields) -> Parts:
    check_known(config, _KNOWN)
    num_layers, rotation = config.int_("num_hidden_layers"), parse_minimax_rotation(config)
    types = config.list_("layer_types") or [_TYPES[0]] * num_layers
    if len(types) != num_layers or set(types) - set(_TYPES):
        raise config.error("layer_types", f"a list of {num_layers} entries (num_hidden_layers), each of {_TYPES}")
    selects = [each == _TYPES[1] for each in types]
    _check_selection(config.child("sparse_attention_config"), selects)
    sparse = sparse_by_type(config, 0)
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("moe_intermediate_size"),
        sparse,
        ExpertChoice(
            "sigmoid",
            is_normalized=True,
            has_correction=True,
            # as in other engines; transformers does so only if routers are stored in float32
            in_float32=True,
            scaling=config.float_("routed_scaling_factor"),
        ),
        SharedExperts(config.int_("shared_intermediate_size"), size_key="shared_intermediate_size"),
        _EXPERTS,
        size_key="intermediate_size of an expert",
    )
    return plain_parts(
        config,
        qk_norm="heads",
        norm_offset=1.0,
        rotations=[rotation] * num_layers,
        gate=ClampedSwiglu(config.float_("swiglu_alpha"), config.float_("swiglu_limit")),
        moe=experts if any(sparse) else None,
        indexer=parse_block_indexer(config, selects, rotation.num_components(head_dim(config))),
    )


def _check_selection(config: JsonFields, selects: list[bool]) -> None:
    """Check what config.json says of indexers. `selects`: by layer, whether it has one."""
    check_known(config, _KNOWN_OF_SELECTION)
    has_no_values = config.list_("sparse_disable_index_value") or []
    if not all(each for each, selects_blocks in zip(has_no_values, selects, strict=False) if selects_blocks):
        raise config.error(
            "sparse_disable_index_value", "1 for each layer that selects blocks: indexers have no values"
        )


MINIMAX_M3 = Family(_DEFAULTS, _parts, _convert)
