"""Jamba: layers of Mamba-1 among some with attention, which isn't rotated, and experts in some layers."""

from __future__ import annotations

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts
from raycore.models.mamba import mamba1_layers
from raycore.models.spec import Parts, TensorNames
from raycore.parts.experts.models import ExpertNames, MoeSpec, StackedNames, num_chosen, num_experts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 65536,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
}
_KEYS = ("mamba_d_state", "mamba_dt_rank", "mamba_d_conv", "mamba_proj_bias", "mamba_conv_bias")
_BLOCK = "feed_forward"
_NAMES = TensorNames(
    before_feed_forward="pre_ff_layernorm",
    gate=f"{_BLOCK}.gate_proj",
    up=f"{_BLOCK}.up_proj",
    down=f"{_BLOCK}.down_proj",
    last_norm="final_layernorm",
)
_EXPERT_NAMES = ExpertNames(_BLOCK, router="router", stacked=StackedNames(_BLOCK))


def _parts(config: JsonFields) -> Parts:
    attends = _every(config, "attn_layer")
    num_channels, norm_eps = config.int_("mamba_expand") * config.int_("hidden_size"), config.float_("rms_norm_eps")
    state = mamba1_layers(config, [not each for each in attends], num_channels, _KEYS)
    return plain_parts(
        config,
        rotations=[None] * len(attends),
        state=None if all(attends) else msgspec.structs.replace(state, norms="weighted", norm_eps=norm_eps),
        moe=_experts(config),
        names=_NAMES,
    )


def _experts(config: JsonFields) -> MoeSpec | None:
    sparse = _every(config, "expert_layer")
    if num_experts(config) == 1 or not any(sparse):
        return None
    sizes = num_experts(config), num_chosen(config), config.int_("intermediate_size")
    return MoeSpec(*sizes, sparse, names=_EXPERT_NAMES, size_key="intermediate_size")


def _every(config: JsonFields, key: str) -> list[bool]:
    """Return for each layer whether it is one of those that come again and again, `key`_period layers apart."""
    period, offset = config.int_(f"{key}_period"), config.int_(f"{key}_offset", low=0)
    if offset >= period:
        raise config.error(f"{key}_offset", f"a number below {key}_period={period}")
    return [layer % period == offset for layer in range(config.int_("num_hidden_layers"))]


JAMBA = Family(_DEFAULTS, _parts)
