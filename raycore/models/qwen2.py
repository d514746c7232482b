"""Qwen2 and Qwen2.5: Llama with biases of queries, keys and values, and windows in some layers."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts, sliding_layers
from raycore.models.spec import Parts

QWEN2_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "bos_token_id": None,
    "eos_token_id": None,
}


def windows(config: JsonFields) -> list[int | None]:
    """Return each layer's window: from `max_window_layers` on, unless `layer_types` says otherwise."""
    return windows_of_last(
        config, config.optional_int("sliding_window") if config.bool_("use_sliding_window") else None
    )


def windows_of_last(config: JsonFields, window: int | None) -> list[int | None]:
    """Return each layer's window: `window` from `max_window_layers` on, unless `layer_types` says otherwise."""
    num_layers = config.int_("num_hidden_layers")
    if window is None:
        return [None] * num_layers
    sliding = sliding_layers(config)
    if sliding is None:
        first = config.int_("max_window_layers", low=0)
        sliding = [layer >= first for layer in range(num_layers)]
    return [window if is_sliding else None for is_sliding in sliding]


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, qkv_bias=True, layer_windows=windows(config))


QWEN2 = Family(QWEN2_DEFAULTS, _parts)
