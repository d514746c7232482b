"""Images for prompts: read from where they are, and written into URLs. Needs the extra `multimodal`."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from raycore.parts.images.client.images import decode_image
from raycore.parts.images.client.sources import Sources
from raycore.parts.images.config import WHITE, MultiModalConfig

if TYPE_CHECKING:
    from PIL.Image import Image


def fetch_image(image_url: str, image_io_kwargs: dict[str, Any] | None = None) -> Image:
    """The image that a URL of a public host, a `data:` URL or a `file:` URL names, in RGB.

    Raises:
        InvalidRequest: it can't be read, or isn't an image.
    """
    host = urlsplit(image_url).hostname
    config = MultiModalConfig(allowed_media_domains=(host,) if host else (), allowed_local_media_path="/")
    background = (image_io_kwargs or {}).get("rgba_background_color", WHITE)
    return decode_image(Sources(config).read(image_url), config.max_image_pixels, background)


def convert_image_mode(image: Image, to_mode: str, rgba_background_color: tuple[int, int, int] = WHITE) -> Image:
    """The image in another of Pillow's modes. What is transparent gets the color if the mode has no transparency."""
    from PIL import Image as Images

    if image.mode == to_mode:
        return image
    if "A" in image.mode and "A" not in to_mode:
        layer = image.convert("RGBA")
        image = Images.new("RGB", layer.size, rgba_background_color)
        image.paste(layer, mask=layer.getchannel("A"))
    return image.convert(to_mode)


def encode_image_base64(image: Image, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """The image as a file, in base64. `image_mode`: Pillow's mode; None: the image's own."""
    file = io.BytesIO()
    (image if image_mode is None else convert_image_mode(image, image_mode)).save(file, format)
    return base64.b64encode(file.getvalue()).decode()


def encode_image_url(image: Image, *, image_mode: str | None = "RGB", format: str = "PNG") -> str:
    """The same as a `data:` URL."""
    return f"data:image/{format.lower()};base64,{encode_image_base64(image, image_mode=image_mode, format=format)}"
