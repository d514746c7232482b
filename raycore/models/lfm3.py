"""LFM3: LFM2 with norms of results, a gate for each head, and layers with windows."""

from __future__ import annotations

import msgspec

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, plain_parts
from raycore.models.mixers.short_conv import ShortConvSpec
from raycore.models.rotation import Rotation, parse_rotation
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 128000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    "bos_token_id": 124894,
    "eos_token_id": 124900,
}
_NAMES = TensorNames(
    before_attention="operator_norm",
    before_feed_forward="ffn_norm",
    down="feed_forward.w2",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    last_norm="embedding_norm",
)
_WITH_NORMS_OF_RESULTS = msgspec.structs.replace(
    _NAMES, after_attention="post_operator_norm", after_feed_forward="post_ffn_norm"
)
_TYPES = ("conv", "sliding_attention", "full_attention")


def _types(config: JsonFields) -> list[str]:
    """Return the types of layers. By default, every second one has attention, and every second of these a window."""
    num_layers, types = config.int_("num_hidden_layers"), config.list_("layer_types")
    if types is None:
        return [
            "full_attention" if layer % 4 == 2 else "sliding_attention" if layer % 4 == 0 and layer else "conv"
            for layer in range(num_layers)
        ]
    if len(types) != num_layers or any(each not in _TYPES for each in types) or set(types) == {"conv"}:
        expected = f"a list of {num_layers} entries (num_hidden_layers), each {', '.join(_TYPES)}, not all of them conv"
        raise config.error("layer_types", expected)
    return types


def _rotation(config: JsonFields, kind: str) -> Rotation:
    """Return the rotation of a type of layers. As in transformers' code, plain ones turn whole heads."""
    rotation = parse_rotation(config, kind)
    is_plain = rotation.scaling is None and not rotation.is_proportional
    return msgspec.structs.replace(rotation, fraction=1.0) if is_plain else rotation


def _parts(config: JsonFields) -> Parts:
    types = _types(config)
    layers = [each == "conv" for each in types]
    convolutions = ShortConvSpec(
        layers=layers,
        num_channels=config.int_("hidden_size"),
        conv_size=config.int_("conv_L_cache", low=2),
        has_bias=config.bool_("conv_bias"),
    )
    window = config.int_("sliding_window") if "sliding_attention" in types else None
    rotations = {each: _rotation(config, each) for each in _TYPES if each != "conv" and each in types}
    return plain_parts(
        config,
        gate="silu",
        **attention_biases(config),
        qk_norm="heads",
        layer_windows=[window if each == "sliding_attention" else None for each in types],
        rotations=[rotations.get(each) for each in types],
        attention_gate="heads" if config.bool_("use_attention_gate") else None,
        state=convolutions if any(layers) else None,
        names=_WITH_NORMS_OF_RESULTS if config.bool_("use_sandwich_norm") else _NAMES,
    )


def _convert(config: dict[str, object]) -> dict[str, object]:
    return config | ({"rms_norm_eps": config["norm_eps"]} if "norm_eps" in config else {})


LFM3 = Family(_DEFAULTS, _parts, _convert)
