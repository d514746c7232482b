"""Finds the images in a conversation's messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, cast

from raycore.errors import InvalidRequest


class MediaPart(NamedTuple):
    """An image in a conversation."""

    kind: Literal["url", "image", "embeddings"]
    value: Any
    """The URL, or the image or embeddings themselves."""
    name: str | None = None
    """A name of the user's that stands for the image's content (`uuid`)."""
    where: str = ""
    """What errors name."""


class ImagePlace(dict[str, Any]):
    """The content part that chat templates get for an image. No request can contain one itself."""

    def __init__(self) -> None:
        super().__init__(type="image")


_OTHER_MEDIA = ("video", "audio", "file")


def take_images(messages: Sequence[Any]) -> tuple[Sequence[Any], list[MediaPart]]:
    """Take the images out of messages.

    Returns: the messages, with an `ImagePlace` for each image, and the images in order. Messages without images stay as
        they are.

    Raises:
        InvalidRequest: a part isn't an image as OpenAI or vLLM describe it.
    """
    found: list[MediaPart] = []
    kept: list[Any] = []
    for index, message in enumerate(messages):
        given: object = cast("Mapping[str, Any]", message).get("content") if isinstance(message, Mapping) else None
        if not isinstance(given, list | tuple):
            kept.append(message)
            continue
        parts: list[Any] = []
        num_before = len(found)
        for number, part in enumerate(cast("Sequence[Any]", given)):
            image = _image(part, f"messages[{index}].content[{number}]")
            if image is not None:
                found.append(image)
            parts.append(part if image is None else ImagePlace())
        kept.append({**message, "content": parts} if len(found) > num_before else message)
    return kept, found


def _image(part: Any, where: str) -> MediaPart | None:
    """Return the image that a content part is. None: it is something else."""
    if not isinstance(part, Mapping):
        return None
    fields = cast("Mapping[str, Any]", part)
    kind = fields.get("type")
    if kind is None:
        kind = next((name for name in ("image_url", "image_pil", "image_embeds") if name in fields), None)
    if not isinstance(kind, str):
        return None
    if any(other in kind for other in _OTHER_MEDIA):
        raise InvalidRequest(f"{where} is of type {kind!r}: of media, only images are supported")
    name: object = fields.get("uuid")
    if name is not None and not (isinstance(name, str) and 0 < len(name) <= 1024):
        raise InvalidRequest(f"{where} has uuid={name!r}, which isn't a text of 1 to 1024 characters")
    if kind in ("image_url", "input_image"):
        value: Any = fields.get("image_url")
        url = cast("Mapping[str, Any]", value).get("url") if isinstance(value, Mapping) else value
        if url is None and name is not None:
            return MediaPart("image", None, name, where)
        if not isinstance(url, str):
            raise InvalidRequest(f"{where} has no URL of an image: it needs 'image_url': {{'url': ...}}")
        return MediaPart("url", url, name, where)
    if kind == "image_pil" or (kind == "image" and fields.get("image") is not None):
        return MediaPart("image", fields.get(kind), name, where)
    return MediaPart("embeddings", fields.get("image_embeds"), name, where) if kind == "image_embeds" else None
