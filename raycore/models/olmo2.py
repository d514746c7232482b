"""OLMo 2: norms after the blocks, and of all query and of all key heads together."""

from __future__ import annotations

from typing import Any

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, attention_biases, plain_parts
from raycore.models.spec import Parts, TensorNames

OLMO_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 50304,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": 50279,
}
NORMS_AFTER_BLOCKS = TensorNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_feed_forward=None,
    after_feed_forward="post_feedforward_layernorm",
)


def olmo_parts(config: JsonFields, **parts: Any) -> Parts:
    """Return the parts of OLMo 2, and `parts`."""
    parts = {"names": NORMS_AFTER_BLOCKS, **parts}
    return plain_parts(config, **attention_biases(config), qk_norm="width", **parts)


OLMO2 = Family(OLMO_DEFAULTS, olmo_parts)
