"""OLMo 3: OLMo 2 with windows in three of four layers, whose rotations aren't scaled."""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import Family, rotations_by_type, windows_by_type
from raycore.models.olmo2 import OLMO_DEFAULTS, olmo_parts
from raycore.models.rotation import Rotation, parse_rotation
from raycore.models.spec import Parts

_DEFAULTS = {**OLMO_DEFAULTS, "sliding_window": 4096, "rope_theta": 500000.0}
_EVERY = 4


def _parts(config: JsonFields) -> Parts:
    plain = Rotation(parse_rotation(config, "full_attention").theta)
    return olmo_parts(
        config,
        layer_windows=windows_by_type(config, full_every=_EVERY),
        rotations=rotations_by_type(config, plain, full_every=_EVERY),
    )


OLMO3 = Family(_DEFAULTS, _parts)
