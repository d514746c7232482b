"""Llama 4 (the texts): attention within chunks, layers without rotation, and experts beside a shared one."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, check_known, fields_of, plain_parts
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts, QueryScale, TensorNames
from raycore.parts.experts.models import (
    ExpertChoice,
    ExpertNames,
    MoeSpec,
    SharedExperts,
    StackedNames,
    num_chosen,
    num_experts,
)

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 202048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
_NAMES = TensorNames(gate="feed_forward.gate_proj", up="feed_forward.up_proj", down="feed_forward.down_proj")
_EXPERTS = ExpertNames("feed_forward", router="router", shared="shared_expert", stacked=StackedNames("feed_forward"))
_SIZE, _DENSE_SIZE = "intermediate_size", "intermediate_size_mlp"


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the size of dense layers where other families have it."""
    fields = fields_of(config, _DEFAULTS)
    if config.get("attn_temperature_tuning") in (0, 4):  # as transformers 4.51 wrote it
        config["attn_temperature_tuning"] = bool(config["attn_temperature_tuning"])
    return config | {_SIZE: fields.int_(_DENSE_SIZE), "moe_intermediate_size": fields.int_(_SIZE)}


def _parts(config: JsonFields) -> Parts:
    check_known(config, {"router_jitter_noise": 0.0})
    rotates = _rotates(config)
    rotation = parse_rotation(config, is_adjacent=True)
    has_norms = config.bool_("use_qk_norm")
    return plain_parts(
        config,
        **attention_biases(config),
        qk_norm="unit" if has_norms else None,
        is_rotated_first=has_norms,
        layer_windows=_chunks(config, rotates),
        windows_are_chunks=True,
        rotations=[rotation if each else None for each in rotates],
        query_scale=_query_scale(config) if config.bool_("attn_temperature_tuning") else None,
        moe=_experts(config),
        names=_NAMES,
    )


def _query_scale(config: JsonFields) -> QueryScale:
    """Return how queries grow with positions in layers that don't rotate."""
    period = config.float_("floor_scale")
    if not period.is_integer():
        raise config.error("floor_scale", "a whole number of tokens")
    return QueryScale(config.float_("attn_scale"), int(period), shift=1, with_rotation=False)


def _rotates(config: JsonFields) -> list[bool]:
    """Return for each layer whether it rotates. Without a list, every `no_rope_layer_interval`-th one doesn't."""
    num_layers, given = config.int_("num_hidden_layers"), config.list_("no_rope_layers")
    if not given:
        every = config.int_("no_rope_layer_interval")
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if len(given) < num_layers or any(each not in (0, 1) for each in given):
        raise config.error("no_rope_layers", f"{num_layers} entries (num_hidden_layers), each 1, or 0 without rotation")
    return [bool(each) for each in given[:num_layers]]


def _chunks(config: JsonFields, rotates: list[bool]) -> list[int | None]:
    """Return each layer's chunk. Without types, layers that rotate have one."""
    chunk, types = config.optional_int("attention_chunk_size"), config.list_("layer_types")
    if types is None:
        return [chunk if each else None for each in rotates]
    if len(types) != len(rotates) or any(each not in ("chunked_attention", "full_attention") for each in types):
        expected = f"a list of {len(rotates)} entries (num_hidden_layers), each chunked_attention or full_attention"
        raise config.error("layer_types", expected)
    if chunk is None and "chunked_attention" in types:
        raise config.error("attention_chunk_size", "the size of chunks, which layer_types needs")
    return [chunk if each == "chunked_attention" else None for each in types]


def _experts(config: JsonFields) -> MoeSpec | None:
    num_layers, given = config.int_("num_hidden_layers"), config.list_("moe_layers")
    every = config.int_("interleave_moe_layer_step")
    layers = range(every - 1, num_layers, every) if given is None else given
    sparse, size = [layer in layers for layer in range(num_layers)], config.int_("moe_intermediate_size")
    experts = MoeSpec(
        num_experts(config),
        num_chosen(config),
        size,
        sparse,
        ExpertChoice("sigmoid"),
        SharedExperts(size, size_key=_SIZE),
        _EXPERTS,
        size_key=_SIZE,
        weighs_inputs=True,
        is_transposed=True,
    )
    return experts if any(sparse) else None


LLAMA4 = Family(_DEFAULTS, _parts, _convert)
