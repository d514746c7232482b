"""EXAONE 4: Llama with norms of query and key heads, and of results instead of before the blocks. If some layers have
windows, the others don't rotate.
"""

from __future__ import annotations

from raycore.json_fields import JsonFields
from raycore.models.family import DEFAULTS, Family, plain_parts, windows_by_type
from raycore.models.olmo2 import NORMS_AFTER_BLOCKS
from raycore.models.rotation import Rotation, parse_rotation
from raycore.models.spec import Parts

EXAONE4_DEFAULTS = {
    **DEFAULTS,
    "vocab_size": 102400,
    "intermediate_size": 16384,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "bos_token_id": 0,
}


def _parts(config: JsonFields) -> Parts:
    return plain_parts(
        config,
        qk_norm="heads",
        layer_windows=windows(config),
        rotations=local_rotations(config),
        names=NORMS_AFTER_BLOCKS,
    )


def local_rotations(config: JsonFields) -> list[Rotation | None]:
    """Return the rotations of layers with windows. Without `sliding_window`, all layers have them."""
    rotation, has_windows = parse_rotation(config), config.optional_int("sliding_window") is not None
    return [rotation if window is not None or not has_windows else None for window in windows(config)]


def windows(config: JsonFields) -> list[int | None]:
    """Return each layer's window. Without `layer_types`, every `sliding_window_pattern`-th layer has none."""
    is_listed = config.list_("layer_types") is not None or config.get("sliding_window") is None
    # real files with a pattern such as LLLG have types, too
    return windows_by_type(config, full_every=None if is_listed else config.int_("sliding_window_pattern"))


EXAONE4 = Family(EXAONE4_DEFAULTS, _parts)
