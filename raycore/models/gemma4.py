"""Gemma 4, text: norms on both sides of the blocks and of values, windows in most layers, and larger heads in the
others. The last layers may read the keys and values of earlier ones, and layers may have inputs of their own.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from msgspec.structs import replace

from raycore.json_fields import JsonFields
from raycore.models.closing import ClosingSpec, LayerInputsSpec
from raycore.models.family import DEFAULTS, Family, fields_of, gate, plain_parts, sliding_layers
from raycore.models.mixers.attention import LayerHeads
from raycore.models.rotation import Rotation, parse_rotation
from raycore.models.spec import Parts, TensorNames
from raycore.parts.experts.models import ClosingMoeSpec, ExpertChoice, ExpertNames, SharedExperts, StackedNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
_FULL_EVERY = 6
"""Without types, every such layer has no window. The last one never has."""
_NAMES = TensorNames(after_attention="post_attention_layernorm", before_feed_forward="pre_feedforward_layernorm")
_EXPERTS = ExpertNames(
    shared="mlp", shared_is_in_block=False, stacked=StackedNames("experts", "gate_up_proj", "down_proj")
)
_HEAD_KEYS = ("head_dim", "num_key_value_heads")
"""What layers may have of their own."""


def _convert(config: dict[str, Any]) -> dict[str, Any]:
    """Return what is in config.json, with the types and the heads of all layers."""
    fields = fields_of(config, _DEFAULTS)
    num_layers, types = fields.int_("num_hidden_layers"), fields.list_("layer_types")
    if types is None:
        types = ["sliding_attention" if (layer + 1) % _FULL_EVERY else "full_attention" for layer in range(num_layers)]
    config["layer_types"] = [*types[:-1], "full_attention"]
    if config.get("rope_parameters") is None:
        config["rope_parameters"] = _ROPE
    if config.get("per_layer_config") is None:
        own = {"head_dim": fields.int_("global_head_dim")}
        num = fields.optional_int("num_global_key_value_heads")
        if num is not None and fields.bool_("attention_k_eq_v"):
            own["num_key_value_heads"] = num
        full = (layer for layer, each in enumerate(config["layer_types"]) if each == "full_attention")
        config["per_layer_config"] = {str(layer): own for layer in full}
    return config


def _layer_heads(config: JsonFields) -> list[LayerHeads]:
    """Return the heads of each layer. The last `num_kv_shared_layers` read what the last one before them of their type
    keeps."""
    windows, own = sliding_layers(config), config.child("per_layer_config")
    assert windows is not None, "_convert has given types"
    num_heads = config.int_("num_attention_heads")
    found: list[LayerHeads] = []
    for layer, (is_local, source) in enumerate(zip(windows, sources(config, windows), strict=True)):
        of_layer = own.child(str(layer))
        for key in of_layer.values.keys() - _HEAD_KEYS:
            raise of_layer.error(key, f"only {' and '.join(_HEAD_KEYS)} of layers' own")
        num_kv_heads, head_dim = of_layer.optional_int("num_key_value_heads"), of_layer.optional_int("head_dim")
        num_kv_heads = num_kv_heads or config.optional_int("num_key_value_heads") or num_heads
        head_dim = head_dim or config.int_("head_dim")
        if num_heads % num_kv_heads:
            raise of_layer.error("num_key_value_heads", f"a divisor of num_attention_heads={num_heads}")
        if head_dim % 2:
            raise of_layer.error("head_dim", "an even number, for the rotary embedding")
        heads = LayerHeads(
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            values_are_keys=config.bool_("attention_k_eq_v") and not is_local,
        )
        if source is not None:
            if heads != replace(found[source], source=None):
                raise config.error(
                    "per_layer_config", f"the same heads in layer {layer} as in {source}, which it reads"
                )
            heads = replace(heads, source=source)
        found.append(heads)
    for key in own.values:
        if not (key.isdigit() and int(key) < len(windows)):
            raise own.error(key, f"numbers of layers below num_hidden_layers={len(windows)}")
    return found


def sources(config: JsonFields, windows: list[bool]) -> list[int | None]:
    """Return for each layer the one whose keys and values it reads. None: its own.

    Args:
        windows: for each layer, whether it has a window.
    """
    first = len(windows) - config.int_("num_kv_shared_layers", low=0)
    if first < 1 or not set(windows[first:]) <= set(windows[:first]):
        expected = f"so few of {len(windows)} layers (num_hidden_layers) that each type has a layer before them"
        raise config.error("num_kv_shared_layers", expected)
    shared = (max(each for each in range(first) if windows[each] == is_local) for is_local in windows[first:])
    return [*[None] * first, *shared]


def rotation_of_type(config: JsonFields, kind: str) -> Rotation:
    """Return the rotation of layers of a type. Only proportional and scaled ones may turn a part of heads."""
    rotation = parse_rotation(config, kind)
    # transformers' code of this architecture turns whole heads by default
    return rotation if rotation.is_proportional or rotation.scaling is not None else replace(rotation, fraction=1.0)


def _closings(config: JsonFields, heads: list[LayerHeads]) -> list[ClosingSpec]:
    """Return the feed-forward part of each layer, which may be twice as wide where keys and values aren't its own."""
    size, inputs = config.int_("intermediate_size"), config.optional_int("hidden_size_per_layer_input", low=0)
    plain = ClosingSpec(intermediate_size=size, input_size=inputs or None)
    wide = plain
    if config.bool_("use_double_wide_mlp"):
        wide = ClosingSpec(intermediate_size=2 * size, input_size=inputs or None, size_key="intermediate_size times 2")
    return [plain if each.source is None else wide for each in heads]


def _layer_inputs(config: JsonFields) -> LayerInputsSpec | None:
    size = config.optional_int("hidden_size_per_layer_input", low=0)
    if not size:
        return None
    num_tokens = config.int_("vocab_size_per_layer_input")
    if num_tokens < config.int_("vocab_size"):
        raise config.error("vocab_size_per_layer_input", f"at least vocab_size={config.int_('vocab_size')}")
    return LayerInputsSpec(size, num_tokens)


def _parts(config: JsonFields) -> Parts:
    # only tokens of images see those after them with `vision`
    if config.get("use_bidirectional_attention") not in (None, "vision"):
        raise config.error("use_bidirectional_attention", "null or vision")
    has_bias, heads = config.bool_("attention_bias"), _layer_heads(config)
    closings = _closings(config, heads)
    windows, window = sliding_layers(config) or [], config.int_("sliding_window")
    full, local = (rotation_of_type(config, kind) for kind in ("full_attention", "sliding_attention"))
    return plain_parts(
        config,
        qkv_bias=has_bias,
        o_bias=has_bias,
        qk_norm="heads",
        norms_values=True,
        gate=gate(config, "hidden_activation"),
        attention_scale=1.0,
        layer_heads=heads,
        layer_windows=[window if each else None for each in windows],
        rotations=[local if each else full for each in windows],
        moe=_experts(config, closings),
        closings=[] if config.bool_("enable_moe_block") else closings,
        layer_inputs=_layer_inputs(config),
        embedding_multiplier=math.sqrt(config.int_("hidden_size")),
        rounds_embedding_multiplier=True,
        logits_softcap=config.optional_float("final_logit_softcapping"),
        names=_NAMES,
    )


def _experts(config: JsonFields, closings: list[ClosingSpec]) -> ClosingMoeSpec | None:
    if not config.bool_("enable_moe_block"):
        return None
    if any(each != closings[0] for each in closings):
        raise config.error("use_double_wide_mlp", "false where there are experts (enable_moe_block)")
    num, num_chosen = config.int_("num_experts"), config.int_("top_k_experts")
    if num_chosen > num:
        raise config.error("top_k_experts", f"at most num_experts={num}")
    return ClosingMoeSpec(
        num_experts=num,
        num_experts_per_tok=num_chosen,
        intermediate_size=config.int_("moe_intermediate_size"),
        sparse_layers=[True] * len(closings),
        router=ExpertChoice(is_normalized=True),
        shared=SharedExperts(closings[0].intermediate_size, size_key="intermediate_size"),
        names=_EXPERTS,
        end=closings[0],
    )


GEMMA4 = Family(_DEFAULTS, _parts, _convert)
_UNIFIED_DEFAULTS = {
    **_DEFAULTS,
    "sliding_window": 1024,
    "max_position_embeddings": 262144,
    "hidden_size_per_layer_input": 0,
}
GEMMA4_UNIFIED = dataclasses.replace(GEMMA4, defaults=_UNIFIED_DEFAULTS)
"""That of Gemma 4 12B, whose images and sounds have no encoder. Layers have no inputs of their own."""
