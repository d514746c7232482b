"""Granite 4, hybrid: Granite, with experts or without, and layers of Mamba-2 among those with attention."""

from __future__ import annotations

import math
from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import Family, fields_of
from raycore.models.granite import granite_parts
from raycore.models.granite_moe import GRANITE_MOE_DEFAULTS, granite_experts
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.state import state_layers
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts, TensorNames

MAMBA2_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_head": "auto",
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
}
_DEFAULTS = {**GRANITE_MOE_DEFAULTS, **MAMBA2_DEFAULTS, "shared_intermediate_size": 1024}
_NAMES = TensorNames(gate_up="shared_mlp.input_linear", down="shared_mlp.output_linear")
_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""What transformers 4 calls layers, and what it is called now."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    fields = fields_of(config, _DEFAULTS)
    types = fields.list_("layer_types") or fields.list_("layers_block_type")
    if types:
        config["layer_types"] = [_TYPES.get(str(each), each) for each in types]
    if not fields.int_("num_local_experts", low=0):
        # that of experts is the other one
        config["intermediate_size"] = fields.int_("shared_intermediate_size")
    return config


def _parts(config: JsonFields) -> Parts:
    kind = config.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        raise config.error("position_embedding_type", "rope, nope or null")
    rotation = parse_rotation(config) if kind == "rope" else None
    return granite_parts(
        config,
        state=mamba2_layers(config),
        names=_NAMES,
        rotations=[rotation] * config.int_("num_hidden_layers"),
        moe=granite_experts(config) if config.int_("num_local_experts", low=0) else None,
    )


def mamba2_layers(
    config: JsonFields, layers: list[bool] | None = None, num_values: int | None = None, **parts: Any
) -> Mamba2Spec:
    """Return the layers of Mamba-2, whose keys begin with `mamba_`.

    Args:
        layers: which layers these are. None: those that `layer_types` says.
        num_values: number of elements of all heads. None: `mamba_expand` times the hidden size.
        parts: further fields of the result.

    Raises:
        InvalidCheckpoint: their sizes don't fit, or they are of a kind that isn't known.
    """
    if config.bool_("mamba_proj_bias"):
        raise config.error("mamba_proj_bias", "false")
    if config.get("hidden_act") != "silu":
        raise config.error("hidden_act", "silu, which layers of Mamba-2 need")
    num_heads, num_groups = config.int_("mamba_n_heads"), config.int_("mamba_n_groups")
    if num_heads % num_groups:
        raise config.error("mamba_n_groups", f"a divisor of mamba_n_heads={num_heads}")
    said = "mamba_expand times hidden_size" if num_values is None else "mamba_d_ssm"
    num_values = num_values or config.int_("mamba_expand") * config.int_("hidden_size")
    v_dim = num_values // num_heads if config.get("mamba_d_head") == "auto" else config.int_("mamba_d_head")
    if v_dim * num_heads != num_values:
        raise config.error("mamba_n_heads", f"{said}, {num_values}, divided by mamba_d_head")
    check_time_limits(config)
    return Mamba2Spec(
        layers=state_layers(config) if layers is None else layers,
        num_groups=num_groups,
        num_v_heads=num_heads,
        k_dim=config.int_("mamba_d_state"),
        v_dim=v_dim,
        conv_size=config.int_("mamba_d_conv", low=2),
        has_conv_bias=config.bool_("mamba_conv_bias"),
        **parts,
    )


def check_time_limits(config: JsonFields) -> None:
    """Raise InvalidCheckpoint if times of Mamba-2 are limited by `time_step_limit`."""
    limits = config.list_("time_step_limit")
    if limits and [_number(each) for each in limits] != [0.0, math.inf]:
        raise config.error("time_step_limit", "0 and infinity, because others are known for prompts only")


def _number(value: Any) -> float:
    """Return a number, which transformers 5 writes as an object if it is infinite."""
    return float(value["__float__"] if isinstance(value, dict) else value)  # pyright: ignore


GRANITE_HYBRID = Family(_DEFAULTS, _parts, convert_config=_convert)
