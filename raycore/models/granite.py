"""Granite 3 and 4, dense: Llama with multipliers."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, biases, plain_parts
from raycore.models.spec import Parts

GRANITE_DEFAULTS = {
    **DEFAULTS,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "logits_scaling": 1.0,
}


def granite_parts(config: JsonFields, **parts: Any) -> Parts:
    """Return the parts of Granite, and `parts`, which it doesn't have."""
    return plain_parts(
        config,
        **biases(config),
        attention_scale=config.float_("attention_multiplier"),
        embedding_multiplier=config.float_("embedding_multiplier"),
        scales_given_embeddings=True,
        residual_multiplier=config.float_("residual_multiplier"),
        logits_multiplier=1 / config.float_("logits_scaling"),
        **parts,
    )


GRANITE = Family(GRANITE_DEFAULTS, granite_parts)
