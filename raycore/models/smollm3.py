"""SmolLM3: Llama with layers that don't rotate queries and keys."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, biases, plain_parts, windows_by_type
from raycore.models.rotation import parse_rotation
from raycore.models.spec import Parts

_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 128256,
    "hidden_size": 2048,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2e6,
    "no_rope_layer_interval": 4,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "tie_word_embeddings": True,
}


def _rotated_layers(config: JsonFields) -> list[bool]:
    """Return for each layer whether it rotates: `no_rope_layers` has 0 for those that don't."""
    num_layers, given = config.int_("num_hidden_layers"), config.list_("no_rope_layers")
    if given is None:
        interval = config.int_("no_rope_layer_interval")
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if len(given) != num_layers or any(each not in (0, 1) for each in given):
        raise config.error("no_rope_layers", f"a list of {num_layers} entries (num_hidden_layers), each 0 or 1")
    return [bool(each) for each in given]


def _parts(config: JsonFields) -> Parts:
    rotation = parse_rotation(config)
    return plain_parts(
        config,
        **biases(config),
        layer_windows=windows_by_type(config) if config.bool_("use_sliding_window") else None,
        rotations=[rotation if is_rotated else None for is_rotated in _rotated_layers(config)],
    )


SMOLLM3 = Family(_DEFAULTS, _parts)
