"""The images of a chat request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from raycore.client.inputs import ParsedPrompt, PromptImages
from raycore.server.protocol import Message
from raycore.text.media_parts import MediaPart

_KEYS = frozenset({"image_url", "image_pil", "image_embeds", "image"})


def has_images(messages: Iterable[Message] | None) -> bool:
    """Whether a conversation has images, so that preparing it may take seconds."""
    return any(
        str(part.get("type", "")) in (*_KEYS, "input_image") or not _KEYS.isdisjoint(part)
        for message in messages or ()
        if isinstance(message.content, list)
        for part in message.content
    )


def with_images(
    images: PromptImages, text: str, parts: Sequence[MediaPart], fields: dict[str, Any], *, adds_special_tokens: bool
) -> ParsedPrompt:
    """Tokenize a conversation with images.

    Args:
        text: the conversation as its template renders it, with a placeholder for each image.
        fields: further fields of the request that images depend on.

    Raises:
        InvalidRequest: an image is unusable, or the model takes only texts.
    """
    given = {"multi_modal_data": {"image": list(parts)}, **fields}
    token_ids, features, data = images.complete("messages", text, given, adds_special_tokens=adds_special_tokens)
    return ParsedPrompt(None, token_ids, features=features, feature_data=data)
