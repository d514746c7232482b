"""Llama, and the many models that are built like it."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, plain_parts
from raycore.models.spec import Parts


def _parts(config: JsonFields) -> Parts:
    has_bias = config.bool_("attention_bias")
    return plain_parts(config, qkv_bias=has_bias, o_bias=has_bias, mlp_bias=config.bool_("mlp_bias"))


LLAMA = Family(parts=_parts)
