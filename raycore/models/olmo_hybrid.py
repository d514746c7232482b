"""OLMo Hybrid: three of four layers have the gated delta rule, and the others OLMo 3's attention and its norms after
the blocks. Those of the former are before the blocks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.family import Family, fields_of
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.state import state_layers
from raycore.models.olmo2 import NORMS_AFTER_BLOCKS, OLMO_DEFAULTS, olmo_parts
from raycore.models.rotation import parse_rotation, rope_parameters
from raycore.models.spec import LayerNorms, Parts

_DEFAULTS = {
    **OLMO_DEFAULTS,
    "vocab_size": 100352,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "num_attention_heads": 30,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 100257,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
_EVERY = 4
_NORMS = LayerNorms("attention_layer_norm", None, "feedforward_layer_norm", None)
_NAMES = msgspec.structs.replace(NORMS_AFTER_BLOCKS, other_after_attention="feedforward_layer_norm")
"""transformers saves such norms under the name of others."""
_NORM_EPS = 1e-5
"""That of the norms of states' results, which config.json doesn't say."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the sizes that follow from others, and the type of each layer."""
    fields = fields_of(config, _DEFAULTS)
    num_heads, num_layers = fields.int_("num_attention_heads"), fields.int_("num_hidden_layers")
    for key in ("linear_num_key_heads", "linear_num_value_heads"):
        config[key] = fields.optional_int(key) or num_heads
    k_dim = fields.optional_int("linear_key_head_dim")
    k_dim = k_dim or int(0.75 * fields.int_("hidden_size") / config["linear_num_key_heads"])
    config["linear_key_head_dim"] = k_dim
    config["linear_value_head_dim"] = fields.optional_int("linear_value_head_dim") or 2 * k_dim
    if fields.get("layer_types") is None and num_layers < _EVERY:
        config["layer_types"] = ["linear_attention"] * (num_layers - 1) + ["full_attention"]
    return config


def _parts(config: JsonFields) -> Parts:
    num_k_heads, num_v_heads = config.int_("linear_num_key_heads"), config.int_("linear_num_value_heads")
    if num_v_heads % num_k_heads:
        raise config.error("linear_num_value_heads", f"a multiple of linear_num_key_heads={num_k_heads}")
    if config.get("hidden_act") != "silu":
        raise config.error("hidden_act", "silu, which layers with the delta rule need")
    # the models that there are have a base of null, and rotate nothing
    is_rotated = rope_parameters(config).get("rope_theta") is not None
    return olmo_parts(
        config,
        rotations=[parse_rotation(config) if is_rotated else None] * config.int_("num_hidden_layers"),
        names=_NAMES,
        state_norms=_NORMS,
        state=DeltaSpec(
            layers=state_layers(config, _EVERY),
            num_k_heads=num_k_heads,
            num_v_heads=num_v_heads,
            k_dim=config.int_("linear_key_head_dim"),
            v_dim=config.int_("linear_value_head_dim"),
            conv_size=config.int_("linear_conv_kernel_dim", low=2),
            is_interleaved=False,
            is_split=True,
            largest_share=2.0 if config.bool_("linear_allow_neg_eigval") else 1.0,
            norm_eps=_NORM_EPS,
        ),
    )


OLMO_HYBRID = Family(_DEFAULTS, _parts, _convert)
