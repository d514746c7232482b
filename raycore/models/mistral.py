"""Mistral: Llama with a sliding window in every layer. Ministral 8B: in those that config.json names."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts, same_window, windows_by_type
from raycore.models.spec import Parts

MISTRAL_DEFAULTS = {
    **DEFAULTS,
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, layer_windows=same_window(config))


def _ministral_parts(config: JsonFields) -> Parts:
    windows = same_window(config) if config.list_("layer_types") is None else windows_by_type(config)
    return plain_parts(config, layer_windows=windows)


MISTRAL = Family(MISTRAL_DEFAULTS, _parts)
MINISTRAL = Family(MISTRAL_DEFAULTS, _ministral_parts)
