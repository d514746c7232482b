"""Where an image of a request comes from: `data:`, `http:`, `https:` and `file:` URLs."""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from raycore.errors import InvalidRequest
from raycore.parts.images.client.fetching import Fetcher
from raycore.parts.images.client.local_files import read_file_url
from raycore.parts.images.config import MultiModalConfig


class Sources:
    """Reads what URLs name, as far as the options allow it. Thread-safe."""

    def __init__(self, config: MultiModalConfig, fetcher: Fetcher | None = None) -> None:
        """`fetcher`: None: one that follows the options."""
        self._config = config
        self._fetcher = fetcher or Fetcher(config.allowed_media_domains, config.max_image_bytes, config.media_timeout_s)

    def read(self, url: str) -> bytes:
        """Return what a URL names, an encoded image.

        Raises:
            InvalidRequest: the URL is invalid or not allowed, or what it names can't be read or is too large.
        """
        scheme = url[:5].lower()
        if scheme == "data:":
            return decode_data_url(url, self._config.max_image_bytes)
        if scheme == "file:":
            return read_file_url(url, self._config.allowed_local_media_path, self._config.max_image_bytes)
        return self._fetcher.fetch(url)


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """Return the content of a `data:` URL in base64.

    Raises:
        InvalidRequest: it isn't an image in base64, or it is too large.
    """
    head, comma, text = url[5:].partition(",")
    kind, *parameters = head.split(";")
    if not comma:
        raise InvalidRequest("the data URL has no comma before its content")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise InvalidRequest("the data URL isn't in base64")
    if kind and not kind.lower().startswith("image/") and kind.lower() != "application/octet-stream":
        raise InvalidRequest(f"the data URL is of type {kind[:40]!r}, not an image")
    return decode_base64(text, max_bytes, "the data URL")


def decode_base64(text: str, max_bytes: int, what: str) -> bytes:
    """Return the bytes that a text stands for. Raises InvalidRequest if it isn't base64, or stands for too many."""
    if len(text) * 3 // 4 > max_bytes + 2:
        raise InvalidRequest(f"{what} has more than max_image_bytes={max_bytes} bytes")
    try:
        return base64.b64decode(unquote_to_bytes(text) if "%" in text else text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{what} isn't base64: {error}") from None
