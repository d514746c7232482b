"""LFM2: layers with short convolutions, among some with attention. The largest model has experts after dense layers."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, fields_of, plain_parts
from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.models.mixers.state import state_layers
from raycore.models.spec import Parts, TensorNames
from raycore.parts.experts.models import ExpertChoice, ExpertNames, MoeSpec, num_chosen, num_experts, sparse_after

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 65536,
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_auto_adjust_ff_dim": True,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
}
_MOE_DEFAULTS = {
    **_DEFAULTS,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
}
_NAMES = TensorNames(
    before_attention="operator_norm",
    before_feed_forward="ffn_norm",
    down="feed_forward.w2",
    o="self_attn.out_proj",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    last_norm="embedding_norm",
)
_EXPERT_NAMES = ExpertNames("feed_forward", "w1", "w3", "w2", correction="expert_bias")
_KEYS = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
"""What config.json calls what Llama calls otherwise."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    config |= {ours: config[theirs] for theirs, ours in _KEYS.items() if theirs in config}
    fields = fields_of(config, _DEFAULTS)
    types, attention = fields.list_("layer_types"), fields.list_("full_attn_idxs")
    if types is None and attention is not None:
        layers = range(fields.int_("num_hidden_layers"))
        types = ["full_attention" if layer in attention else "conv" for layer in layers]
    if types is not None:
        config["layer_types"] = ["linear_attention" if each == "conv" else each for each in types]
    return config


def _convert_dense(config: dict[str, Any]) -> dict[str, Any]:
    config = _convert(config)
    fields = fields_of(config, _DEFAULTS)
    if fields.bool_("block_auto_adjust_ff_dim"):
        size = int(2 * fields.int_("block_ff_dim" if "block_ff_dim" in config else "intermediate_size") / 3)
        multiplier, multiple = fields.optional_float("block_ffn_dim_multiplier"), fields.int_("block_multiple_of")
        config["intermediate_size"] = size if multiplier is None else -(-int(multiplier * size) // multiple) * multiple
    return config


def _parts(config: JsonFields, moe: MoeSpec | None = None) -> Parts:
    layers = state_layers(config, every=1)
    state = ShortConvSpec(
        layers=layers,
        num_channels=config.int_("hidden_size"),
        conv_size=config.int_("conv_L_cache", low=2),
        has_bias=config.bool_("conv_bias"),
    )
    return plain_parts(
        config, gate="silu", qk_norm="heads", state=state if any(layers) else None, names=_NAMES, moe=moe
    )


def _moe_parts(config: JsonFields) -> Parts:
    router = ExpertChoice(
        "sigmoid",
        is_normalized=config.bool_("norm_topk_prob"),
        least_sum=1e-6,
        has_correction=config.bool_("use_expert_bias"),
        scaling=config.float_("routed_scaling_factor"),
    )
    sparse, size = sparse_after(config, "num_dense_layers"), config.int_("moe_intermediate_size")
    experts = MoeSpec(num_experts(config), num_chosen(config), size, sparse, router, names=_EXPERT_NAMES)
    return _parts(config, experts if any(sparse) else None)


LFM2 = Family(_DEFAULTS, _parts, _convert_dense)
LFM2_MOE = Family(_MOE_DEFAULTS, _moe_parts, _convert)
