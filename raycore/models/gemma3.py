"""Gemma 3, text: Gemma 2 with norms of query and key heads, windows in five of six layers, and no caps. Layers with
windows rotate with a base of their own.
"""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, rotations_by_type
from raycore.models.gemma2 import GEMMA_DEFAULTS, gemma_parts
from raycore.models.rotation import Rotation
from raycore.models.spec import Parts

_DEFAULTS = {
    **GEMMA_DEFAULTS,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 10000.0,
    "sliding_window_pattern": 6,
}


def _parts(config: JsonFields) -> Parts:
    local, every = Rotation(config.float_("rope_local_base_freq")), config.int_("sliding_window_pattern")
    return gemma_parts(config, qk_norm="heads", rotations=rotations_by_type(config, local, full_every=every))


GEMMA3 = Family(_DEFAULTS, _parts)
