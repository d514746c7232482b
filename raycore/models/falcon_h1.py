"""Falcon-H1: attention and Mamba-2 beside each other in each layer, and multipliers of what parts read and return."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.bamba import BAMBA_DEFAULTS, BAMBA_NAMES
from raycore.models.family import Family, biases, plain_parts
from raycore.models.granite_hybrid import mamba2_layers
from raycore.models.mixers.beside import BesideSpec
from raycore.models.rotation import head_dim
from raycore.models.spec import Parts

_DEFAULTS = {
    **BAMBA_DEFAULTS,
    "max_position_embeddings": 8192,
    "partial_rotary_factor": 1.0,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
    "lm_head_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
}


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, without the types of layers, which are all the same."""
    return {key: value for key, value in config.items() if key not in ("layer_types", "layers_block_type")}


def _parts(config: JsonFields) -> Parts:
    if config.bool_("projectors_bias"):
        raise config.error("projectors_bias", "false")
    num_layers = config.int_("num_hidden_layers")
    norm = "before_gate" if config.bool_("mamba_norm_before_gate") else "after_gate"
    mamba = mamba2_layers(
        config,
        [True] * num_layers,
        config.optional_int("mamba_d_ssm"),
        norm=norm if config.bool_("mamba_rms_norm") else None,
        multipliers=_multipliers(config, "ssm_multipliers", 5),
    )
    multipliers: Any = _multipliers(config, "mlp_multipliers", 2)
    return plain_parts(
        config,
        **biases(config),
        dense="plain" if multipliers == (1.0, 1.0) else "scaled",
        mlp_multipliers=multipliers,
        attention_scale=config.float_("key_multiplier") * head_dim(config) ** -0.5,
        embedding_multiplier=config.float_("embedding_multiplier"),
        logits_multiplier=config.float_("lm_head_multiplier"),
        state=BesideSpec(
            mamba.layers,
            mamba,
            (config.float_("attention_in_multiplier"), config.float_("attention_out_multiplier")),
            (config.float_("ssm_in_multiplier"), config.float_("ssm_out_multiplier")),
        ),
        names=BAMBA_NAMES,
    )


def _multipliers(config: JsonFields, key: str, num: int) -> tuple[float, ...]:
    """Return a list of numbers, which are 1 if it is missing or null."""
    given = config.list_(key)
    if given is None:
        return (1.0,) * num
    if len(given) != num or any(isinstance(each, bool) or not isinstance(each, int | float) for each in given):
        raise config.error(key, f"a list of {num} numbers")
    return tuple(map(float, given))


FALCON_H1 = Family(_DEFAULTS, _parts, _convert)
