"""MiniMax-M2: experts in every layer, norms of all query and of all key heads together, and partial rotation."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts
from raycore.models.rotation import parse_minimax_rotation
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
# logits in float32, as in other engines; transformers computes them so only if routers are stored so
_ROUTER = ExpertChoice("sigmoid", is_normalized=True, has_correction=True, in_float32=True)


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
    return plain_parts(config, qk_norm="width", rotations=[parse_minimax_rotation(config)] * num_layers, moe=experts)


MINIMAX_M2 = Family(_DEFAULTS, _parts)
