"""Decodes images. What they say of themselves is checked before anything is decoded."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING, Any

from raycore.errors import InvalidRequest
from raycore.extras import needing
from raycore.parts.images.config import WHITE

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")
"""By Pillow's names. None of them calls another program, or reads another file."""
_MAX_ASPECT = 200
"""The same limit as Qwen's processor has: an image that is longer than that becomes nothing when it is resized."""
_DECODING_ERRORS = (
    *(OSError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, SyntaxError, RuntimeError),
    *(EOFError, MemoryError, struct.error, zlib.error, NotImplementedError, AssertionError, RecursionError),
)
"""What Pillow raises for damaged images, whose content reaches everything in it."""


def decode_image(data: bytes, max_pixels: int, background: Sequence[int] = WHITE) -> Image:
    """Decode an image as RGB. Of an animation, the first frame.

    Args:
        max_pixels: an image with more is refused by its header.
        background: red, green and blue behind transparent parts.

    Raises:
        InvalidRequest: the image is damaged, too large, or of an unknown format.
    """
    with needing("images need", "multimodal"):
        from PIL import Image, ImageOps

    if not data:
        raise InvalidRequest("it is empty")
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise InvalidRequest(f"it has more than max_image_pixels={max_pixels} pixels") from None
    except _DECODING_ERRORS:
        raise InvalidRequest(f"it isn't an image in one of the formats {', '.join(FORMATS)}") from None
    try:
        check_size(image.size, max_pixels)
        image.load()
        check_size(image.size, max_pixels)  # some formats tell the size of what they contain only now
        with suppress(*_DECODING_ERRORS):  # as in viewers, a damaged orientation is none
            image = ImageOps.exif_transpose(image)
        return _as_rgb(image, background)
    except InvalidRequest:
        raise
    except _DECODING_ERRORS as error:
        raise InvalidRequest(f"it is damaged: {str(error) or type(error).__name__}"[:300]) from None


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raise InvalidRequest if an image of so many columns and rows is empty, too large or too narrow."""
    width, height = size
    if width < 1 or height < 1:
        raise InvalidRequest(f"it has {width}x{height} pixels")
    if width * height > max_pixels:
        raise InvalidRequest(f"it has {width}x{height} pixels, more than max_image_pixels={max_pixels}")
    if max(width, height) > _MAX_ASPECT * min(width, height):
        raise InvalidRequest(f"it has {width}x{height} pixels: one side is more than {_MAX_ASPECT} times the other")


def _as_rgb(image: Image, background: Sequence[int]) -> Image:
    from PIL import Image

    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layer = image.convert("RGBA")
        flat = Image.new("RGB", layer.size, tuple(background))
        flat.paste(layer, mask=layer.getchannel("A"))
        return flat
    return image.convert("RGB")


def as_image(given: Any) -> Image | None:
    """Return an image that a program gives, in RGB: a PIL image, or an array of uint8 of (rows, columns, 3), (3, rows,
    columns) or (rows, columns). None: it is none of these.

    Raises:
        InvalidRequest: it is one of these, but of another type or shape, or can't be converted.
    """
    import numpy as np
    from PIL import Image

    if isinstance(given, Image.Image):
        image = given
    elif getattr(given, "__array__", None) is not None:
        array: Any = np.asarray(given)
        if array.ndim == 3 and array.shape[0] == 3 and array.shape[2] != 3:
            array = array.transpose(1, 2, 0)
        is_shaped = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 3)
        if array.dtype != np.uint8 or not is_shaped or not array.size:
            raise InvalidRequest(
                f"it is an array of {array.dtype} of shape {tuple(array.shape)}: an image is one of uint8 of (rows, "
                "columns, 3)"
            )
        image = Image.fromarray(np.ascontiguousarray(array))
    else:
        return None
    try:
        return image if image.mode == "RGB" else image.convert("RGB")
    except _DECODING_ERRORS as error:
        raise InvalidRequest(f"it can't be converted to RGB: {error}") from None
