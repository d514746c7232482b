"""MiniMax-M2: experts in every layer, norms of all query and of all key heads together, and partial rotation."""

from __future__ import annotations

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts
from raycore.models.rotation import Rotation, parse_rotation
from raycore.models.spec import Parts
from raycore.parts.experts.models import ExpertChoice, ExpertNames, MoeSpec, num_chosen, num_experts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 196608,
    "rope_theta": 5e6,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "bos_token_id": 200034,
    "eos_token_id": 200020,
}
_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2", correction="e_score_correction_bias")
_ROUTER = ExpertChoice("sigmoid", is_normalized=True, has_correction=True, in_float32=True)


def _rotation(config: JsonFields) -> Rotation:
    """Return the rotation. The number of rotated components of a head may be at `rotary_dim`."""
    rotation, num_rotated, head_dim = parse_rotation(config), config.optional_int("rotary_dim"), config.int_("head_dim")
    if num_rotated is None or rotation.fraction != 1.0:
        return rotation
    if num_rotated > head_dim:
        raise config.error("rotary_dim", f"at most head_dim={head_dim}")
    return msgspec.structs.replace(rotation, fraction=num_rotated / head_dim)


def _parts(config: JsonFields) -> Parts:
    if config.get("scoring_func") != "sigmoid":
        raise config.error("scoring_func", "sigmoid")
    num_layers = config.int_("num_hidden_layers")
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        config.int_("intermediate_size"),
        [True] * num_layers,
        _ROUTER,
        names=_NAMES,
        size_key="intermediate_size",
    )
    return plain_parts(config, qk_norm="width", rotations=[_rotation(config)] * num_layers, moe=experts)


MINIMAX_M2 = Family(_DEFAULTS, _parts)
