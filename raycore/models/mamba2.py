"""Mamba-2 alone, such as Codestral Mamba: layers that keep a state, without attention and feed-forward parts.

A request's blocks only count its tokens then: no layer has something in them. Layers add to numbers of the model's data
type, whatever `residual_in_fp32` says.
"""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, check_known, fields_of, plain_parts
from raycore.models.granite_hybrid import check_time_limits
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.spec import Parts, Roots, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 32768,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_conv_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
}
_NAMES = TensorNames(before_attention="norm", last_norm="norm_f", embed="embeddings", roots=Roots("backbone."))


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with sizes of attention and of feed-forward parts, which no layer has."""
    if "layer_norm_epsilon" in config:
        config["rms_norm_eps"] = config["layer_norm_epsilon"]
    fields = fields_of(config, _DEFAULTS)
    num_heads = fields.int_("num_heads")
    return config | {
        "head_dim": fields.int_("head_dim"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "intermediate_size": fields.int_("hidden_size"),
    }


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"use_bias": False, "hidden_act": "silu"})
    check_time_limits(config)
    num_layers, num_heads, num_groups = (config.int_(key) for key in ("num_hidden_layers", "num_heads", "n_groups"))
    if num_heads % num_groups:
        raise config.error("n_groups", f"a divisor of num_heads={num_heads}")
    num_values, v_dim = config.int_("expand") * config.int_("hidden_size"), config.int_("head_dim")
    if num_heads * v_dim != num_values:
        raise config.error("num_heads", f"expand times hidden_size, {num_values}, divided by head_dim")
    return plain_parts(
        config,
        rotations=[None] * num_layers,
        state=Mamba2Spec(
            [True] * num_layers,
            num_v_heads=num_heads,
            k_dim=config.int_("state_size"),
            v_dim=v_dim,
            conv_size=config.int_("conv_kernel", low=2),
            num_groups=num_groups,
            has_conv_bias=config.bool_("use_conv_bias"),
            block="mixer",
            size_keys=("num_heads", "n_groups"),
        ),
        parts_alone=["mixer"] * num_layers,
        names=_NAMES,
    )


MAMBA2 = Family(_DEFAULTS, _parts, _convert)
