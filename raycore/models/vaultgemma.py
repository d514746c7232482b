"""VaultGemma: Gemma 2 without the norms after the blocks."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family
from raycore.models.gemma2 import GEMMA2, gemma_parts
from raycore.models.spec import Parts, TensorNames

_NAMES = TensorNames(before_feed_forward="pre_feedforward_layernorm")


def _parts(config: JsonFields) -> Parts:
    return gemma_parts(config, names=_NAMES)


VAULTGEMMA = Family(GEMMA2.defaults, _parts)
