"""Qwen3: Llama with norms of query and key heads."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, attention_biases, plain_parts
from raycore.models.qwen2 import QWEN2_DEFAULTS, windows
from raycore.models.spec import Parts


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, **attention_biases(config), qk_norm="heads", layer_windows=windows(config))


QWEN3 = Family({**QWEN2_DEFAULTS, "head_dim": 128}, _parts)
