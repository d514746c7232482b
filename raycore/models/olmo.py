"""OLMo 1: Llama with layer norms that have no weights."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, attention_biases, plain_parts
from raycore.models.olmo2 import OLMO_DEFAULTS
from raycore.models.spec import Parts


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, **attention_biases(config), norm="bare_layer")


OLMO = Family(OLMO_DEFAULTS, _parts, only={"clip_qkv": None})
