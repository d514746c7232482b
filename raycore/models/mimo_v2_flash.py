"""MiMo-V2-Flash: values that are shorter than keys, and experts in groups after a dense layer. Layers with windows have
heads of their own, and sinks.
"""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import (
    DEFAULTS,
    Family,
    check_known,
    fields_of,
    plain_parts,
    predictors,
    rotations_by_type,
    windows_by_type,
)
from raycore.models.mixers.attention import LayerHeads
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts, TensorNames
from raycore.parts.drafts.models import MtpNames
from raycore.parts.experts.models import MoeSpec, grouped_sigmoid_router, num_chosen, num_experts, sparse_by_type

_FRACTION = 0.334
_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 152576,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": _FRACTION,
    "sliding_window": 129,
    "attention_value_scale": 0.707,
    "add_swa_attention_sink_bias": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "num_nextn_predict_layers": 3,
    "eos_token_id": None,
}
_KNOWN = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_router_activation": "sigmoid"}
"""The router's settings that files have, and what they are in all of these models."""
_NAMES = TensorNames(sinks="self_attn.attention_sink_bias")
_MTP = MtpNames(
    layer="model.mtp.layers.{}.",
    final_norms=("final_layernorm",),
    copies=(),
    before_feed_forward="pre_mlp_layernorm",
    reads_normed=False,
    has_window=True,
    is_sparse=False,
)
_EVERY = 6
"""Without types, the first layer and every such one have no window."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, as transformers has it: the authors' files have other keys."""
    fields = fields_of(config, _DEFAULTS)
    num_layers, pattern = fields.int_("num_hidden_layers"), fields.list_("hybrid_layer_pattern")
    if fields.list_("layer_types") is None:
        is_full = [each == 0 for each in pattern or []] or [
            layer == 0 or (layer + 1) % _EVERY == 0 for layer in range(num_layers)
        ]
        config["layer_types"] = ["full_attention" if each else "sliding_attention" for each in is_full]
    frequencies = fields.list_("moe_layer_freq")
    if fields.list_("mlp_layer_types") is None and frequencies is not None:
        config["mlp_layer_types"] = ["sparse" if each else "dense" for each in frequencies]
    if config.get("rms_norm_eps") is None and "layernorm_epsilon" in config:
        config["rms_norm_eps"] = config["layernorm_epsilon"]
    if fields.optional_int("sliding_window_size") is not None:
        # so many tokens before a token's own
        config["sliding_window"] = fields.int_("sliding_window_size") + 1
    if config.get("routed_scaling_factor", 1.0) is None:
        config["routed_scaling_factor"] = 1.0
    if config.get("rope_parameters") is None:
        shared = {"rope_type": "default", "partial_rotary_factor": config.get("partial_rotary_factor", _FRACTION)}
        config["rope_parameters"] = {
            "full_attention": shared | {"rope_theta": config.get("rope_theta", 5e6)},
            "sliding_attention": shared | {"rope_theta": config.get("swa_rope_theta", 1e4)},
        }
    return config


def _parts(config: JsonFields) -> Parts:
    check_known(config, _KNOWN)
    if config.optional_int("n_shared_experts", low=0):
        raise config.error("n_shared_experts", "null: shared experts aren't computed")
    scale = config.optional_float("attention_value_scale")
    _check_values(config, "v_head_dim", config.int_("head_dim"))
    windows = windows_by_type(config)
    full = LayerHeads(sinks=config.bool_("add_full_attention_sink_bias"))
    local = _local_heads(config)
    return plain_parts(
        config,
        qkv_bias=config.bool_("attention_bias"),
        layer_windows=windows,
        rotations=rotations_by_type(config, parse_rotation(config, "sliding_attention")),
        layer_heads=[full if window is None else local for window in windows],
        value_dim=config.int_("v_head_dim"),
        value_scale=1.0 if scale is None else scale,
        moe=_experts(config),
        names=_NAMES,
        **predictors(config, _MTP),
    )


def _check_values(config: JsonFields, key: str, size: int) -> None:
    """Raise InvalidCheckpoint if values are longer than keys of the size `size`."""
    if (config.optional_int(key) or 0) > size:
        raise config.error(key, f"at most {size}, the size of keys")


def _local_heads(config: JsonFields) -> LayerHeads:
    """Return the heads of layers with windows, which have twice as many key-value heads as the others by default."""
    heads_key, kv_heads_key = "swa_num_attention_heads", "swa_num_key_value_heads"
    _check_values(config, "swa_v_head_dim", config.optional_int("swa_head_dim") or config.int_("head_dim"))
    num_heads = config.optional_int(heads_key) or config.int_("num_attention_heads")
    num_kv_heads = config.optional_int(kv_heads_key) or 2 * config.int_("num_key_value_heads")
    if num_heads % num_kv_heads:
        key = kv_heads_key if config.get(kv_heads_key) else "num_key_value_heads"
        raise config.error(
            key, f"so many that layers with windows, which have {num_kv_heads}, divide {num_heads} heads"
        )
    return LayerHeads(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=config.optional_int("swa_head_dim"),
        value_dim=config.optional_int("swa_v_head_dim"),
        sinks=config.bool_("add_swa_attention_sink_bias"),
        heads_key=heads_key,
        kv_heads_key=kv_heads_key,
    )


def _experts(config: JsonFields) -> MoeSpec | None:
    sparse, size = sparse_by_type(config, num_dense=1), config.int_("moe_intermediate_size")
    router = grouped_sigmoid_router(config)
    return MoeSpec(num_experts(config), num_chosen(config), size, sparse, router) if any(sparse) else None


MIMO_V2_FLASH = Family(_DEFAULTS, _parts, _convert)
