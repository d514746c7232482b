"""AFMoE, of Arcee's Trinity: norms on both sides of the blocks, a gate of attention, and experts after dense layers.
Three of four layers have windows, and only these rotate.
"""

from __future__ import annotations

import math

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, check_known, plain_parts, windows_by_type
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts, TensorNames
from raycore.parts.experts.models import (
    ExpertChoice,
    ExpertNames,
    MoeSpec,
    SharedExperts,
    num_chosen,
    num_experts,
    sparse_after,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 200192,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "sliding_window": 1024,
    "global_attn_every_n_layers": 4,
    "num_dense_layers": 1,
    "num_experts": 64,
    "num_experts_per_tok": 6,
    "num_shared_experts": 2,
    "moe_intermediate_size": 1408,
    "route_scale": 1.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
_NAMES = TensorNames(
    after_attention="post_attention_layernorm",
    before_feed_forward="pre_mlp_layernorm",
    after_feed_forward="post_mlp_layernorm",
)
_EXPERTS = ExpertNames(router="router.gate", correction="expert_bias")
_KNOWN = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
"""The router's settings that files have, and what they are in all of transformers' models."""


def _parts(config: JsonFields) -> Parts:
    check_known(config, _KNOWN)
    rotation = parse_rotation(config)
    windows = windows_by_type(config, full_every=config.int_("global_attn_every_n_layers"))
    return plain_parts(
        config,
        **attention_biases(config),
        qk_norm="heads",
        attention_gate="elements",
        layer_windows=windows,
        rotations=[None if window is None else rotation for window in windows],
        embedding_multiplier=math.sqrt(config.int_("hidden_size")) if config.bool_("mup_enabled") else 1.0,
        scales_given_embeddings=True,
        moe=_experts(config),
        names=_NAMES,
    )


def _experts(config: JsonFields) -> MoeSpec | None:
    size, sparse = config.int_("moe_intermediate_size"), sparse_after(config, "num_dense_layers")
    router = ExpertChoice("sigmoid", is_normalized=True, has_correction=True, scaling=config.float_("route_scale"))
    shared = SharedExperts(
        size * config.int_("num_shared_experts"), size_key="moe_intermediate_size times num_shared_experts"
    )
    experts = MoeSpec(num_experts(config), num_chosen(config), size, sparse, router, shared, _EXPERTS)
    return experts if any(sparse) else None


AFMOE = Family(_DEFAULTS, _parts)
