"""What a checkpoint's image processor says of the sizes of images, read from its files without transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from raycore.parts.images.models import VisionSpec

_FILES = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))


def max_image_tokens(path: Path, vision: VisionSpec, changes: Mapping[str, Any]) -> int | None:
    """Return the maximum number of tokens of an image.

    Args:
        changes: settings that engines give instead of the checkpoint's (`mm_processor_kwargs`).

    Returns: None if it isn't known, because the settings don't say.
    """
    if vision.tokens_per_image is not None:
        return vision.tokens_per_image
    max_pixels = _max_pixels(changes) or _max_pixels(read_settings(path))
    return None if max_pixels is None else max(1, max_pixels // (vision.patch_size * vision.merge_size) ** 2)


def read_settings(path: Path) -> dict[str, Any]:
    """Return the image processor's settings. Empty if the checkpoint has none."""
    for name, key in _FILES:
        file = path / name
        if file.is_file():
            try:
                found: Any = msgspec.json.decode(file.read_bytes())
            except msgspec.DecodeError:
                continue
            if key is not None and isinstance(found, dict):
                found = cast("dict[str, Any]", found).get(key)
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
    return {}


def _max_pixels(settings: Mapping[str, Any]) -> int | None:
    size: Any = settings.get("size")
    longest: Any = cast("dict[str, Any]", size).get("longest_edge") if isinstance(size, dict) else None
    most: Any = settings.get("max_pixels")
    return next((each for each in (most, longest) if isinstance(each, int) and each > 0), None)
