"""Llama, and the many models that are built like it."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, biases, plain_parts
from raycore.models.spec import Parts


def _parts(config: JsonFields) -> Parts:
    return plain_parts(config, **biases(config))


LLAMA = Family(parts=_parts)
