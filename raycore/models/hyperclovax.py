"""HyperCLOVA X: Granite with norms of results, too. Logits are multiplied by what divides Granite's."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, biases, plain_parts
from raycore.models.granite import GRANITE_DEFAULTS
from raycore.models.spec import Parts, TensorNames

_DEFAULTS = {**GRANITE_DEFAULTS, "attention_multiplier": None, "use_post_norm": True}
_NAMES = TensorNames(after_attention="post_norm1", after_feed_forward="post_norm2")


def _parts(config: JsonFields) -> Parts:
    return plain_parts(
        config,
        **biases(config),
        attention_scale=config.optional_float("attention_multiplier"),
        embedding_multiplier=config.float_("embedding_multiplier"),
        scales_given_embeddings=True,
        residual_multiplier=config.float_("residual_multiplier"),
        logits_multiplier=config.float_("logits_scaling"),
        names=_NAMES if config.bool_("use_post_norm") else TensorNames(),
    )


HYPERCLOVAX = Family(_DEFAULTS, _parts)
