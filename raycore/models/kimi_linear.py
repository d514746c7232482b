"""Kimi Linear: three of four layers have Kimi's delta attention, and the others latent attention without rotation.

Experts are those of DeepSeek-V3 under other names.
"""

from __future__ import annotations

from typing import Any

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.deepseek_v3 import latent_config, latent_parts
from raycore.models.family import DEFAULTS, Family, check_known, fields_of
from raycore.models.mixers.kda import KdaSpec
from raycore.models.mixers.state import state_layers
from raycore.models.spec import Parts, TensorNames
from raycore.parts.experts.models import ExpertNames, grouped_sigmoid_router, sparse_layers

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 163840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 27,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1024,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.446,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
}
OTHER_KEYS = {
    "model_max_length": "max_position_embeddings",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
    "num_expert_group": "n_group",
    "moe_renormalize": "norm_topk_prob",
}
"""Names of the same settings elsewhere, by those in config.json."""
_OF_STATES = {
    "num_heads": "linear_num_heads",
    "head_dim": "linear_head_dim",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""The same, of those in `linear_attn_config`."""
_BLOCK = "block_sparse_moe"
_EXPERTS = ExpertNames(_BLOCK, "w1", "w3", "w2")
_DENSE = TensorNames(gate=f"{_BLOCK}.gate_proj", up=f"{_BLOCK}.up_proj", down=f"{_BLOCK}.down_proj")
"""As transformers names the dense layers that it saves."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with lists of each layer's type and of those without experts."""
    config = latent_config({OTHER_KEYS.get(key, key): value for key, value in config.items()})
    fields = fields_of(config, _DEFAULTS)
    num_layers, of_states = fields.int_("num_hidden_layers"), fields.child("linear_attn_config")
    config |= {_OF_STATES[key]: value for key, value in of_states.values.items() if key in _OF_STATES}
    if fields.get("layer_types") is None:
        # counted from 1; without a list, every fourth layer after the first
        given = of_states.list_("full_attn_layers")
        full = range(5, num_layers + 1, 4) if given is None else given
        config["layer_types"] = [
            "full_attention" if layer in full else "linear_attention" for layer in range(1, num_layers + 1)
        ]
    types, num_dense = fields.list_("mlp_layer_types"), fields.optional_int("first_k_dense_replace", low=0)
    if types is not None:
        config["mlp_only_layers"] = [layer for layer, each in enumerate(types) if each == "dense"]
    elif num_dense is not None:
        config["mlp_only_layers"] = list(range(min(num_dense, num_layers)))
    return config


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"moe_router_activation_func": "sigmoid", "hidden_act": "silu"})
    if not config.bool_("mla_use_nope"):
        raise config.error("mla_use_nope", "true, because latent attention with rotation isn't known of this family")
    head_dim = config.int_("linear_head_dim")
    state = KdaSpec(
        layers=state_layers(config),
        num_v_heads=config.int_("linear_num_heads"),
        k_dim=head_dim,
        v_dim=head_dim,
        conv_size=config.int_("linear_conv_kernel_dim", low=2),
    )
    parts = latent_parts(config, grouped_sigmoid_router(config), is_adjacent=True, sparse=sparse_layers(config))
    return msgspec.structs.replace(
        parts,
        rotations=[None] * len(parts.rotations),
        state=state,
        moe=None if parts.moe is None else msgspec.structs.replace(parts.moe, names=_EXPERTS),
        # only transformers has this key
        names=parts.names if config.get("mlp_layer_types") is None else _DENSE,
    )


KIMI_LINEAR = Family(_DEFAULTS, _parts, _convert)
