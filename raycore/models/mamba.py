"""Mamba and Falcon-Mamba: layers of Mamba-1 alone, without attention and feed-forward parts.

A request's blocks only count its tokens then: no layer has something in them. Layers add to numbers of the model's data
type, whatever `residual_in_fp32` says. Falcon-Mamba normalizes what recurrences read, without weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, fields_of, norm_eps_at, plain_parts
from raycore.models.mixers.mamba1 import Mamba1Spec
from raycore.models.spec import Parts, Roots, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 50280,
    "hidden_size": 768,
    "intermediate_size": None,
    "state_size": 16,
    "time_step_rank": "auto",
    "expand": 2,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "mixer_rms_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
_KEYS = ("state_size", "time_step_rank", "conv_kernel", "use_bias", "use_conv_bias")
_NAMES = TensorNames(before_attention="norm", last_norm="norm_f", embed="embeddings", roots=Roots("backbone."))


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with sizes of attention, which no layer has, and that of all channels."""
    fields = fields_of(config, _DEFAULTS)
    # some files have both, and another number for `expand`
    num_channels = fields.optional_int("intermediate_size") or fields.int_("expand") * fields.int_("hidden_size")
    sizes = dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), num_channels)
    return norm_eps_at("layer_norm_epsilon")(config | sizes | {"head_dim": 2})


def mamba1_layers(config: JsonFields, layers: list[bool], num_channels: int, keys: Sequence[str]) -> Mamba1Spec:
    """Return the layers of Mamba-1.

    Args:
        layers: which layers these are.
        keys: of the size of a channel's state, of the size of what times are made of, of the convolution's number of
            taps, and of whether projections and the convolution have biases.

    Raises:
        InvalidCheckpoint: a size isn't as it must be, or the activation isn't known.
    """
    if config.get("hidden_act") != "silu":
        raise config.error("hidden_act", "silu, which layers of Mamba-1 need")
    state_size, time_size, conv_size, has_bias, has_conv_bias = keys
    has_default = config.get(time_size) == "auto"
    return Mamba1Spec(
        layers,
        num_channels,
        state_size=config.int_(state_size, low=2),
        time_size=-(-config.int_("hidden_size") // 16) if has_default else config.int_(time_size),
        conv_size=config.int_(conv_size, low=2),
        has_bias=config.bool_(has_bias),
        has_conv_bias=config.bool_(has_conv_bias),
    )


def _parts(config: JsonFields, **fields: Any) -> Parts:
    num_layers = config.int_("num_hidden_layers")
    state = mamba1_layers(config, [True] * num_layers, config.int_("intermediate_size"), _KEYS)
    return plain_parts(
        config,
        rotations=[None] * num_layers,
        state=msgspec.structs.replace(state, block="mixer", size_key="expand times hidden_size", **fields),
        parts_alone=["mixer"] * num_layers,
        names=_NAMES,
    )


def _normalized_parts(config: JsonFields) -> Parts:
    return _parts(config, norms="bare", norm_eps=config.float_("mixer_rms_eps"))


MAMBA = Family(_DEFAULTS, _parts, _convert)
FALCON_MAMBA = Family(_DEFAULTS, _normalized_parts, _convert)
