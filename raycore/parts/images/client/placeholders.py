"""The places of images in prompts: a placeholder for each image becomes as many tokens as the image has embeddings.

The tokens are those that the checkpoint's processor of texts and images makes.
"""

from __future__ import annotations

from collections.abc import Sequence

from raycore.errors import InvalidRequest
from raycore.messages import Feature
from raycore.parts.images.client.processor import Processed
from raycore.parts.images.models import VisionSpec
from raycore.text.tokenizer import Tokenizer


class Placeholders:
    """Expands the placeholders of one model."""

    def __init__(self, vision: VisionSpec, tokenizer: Tokenizer) -> None:
        self._vision = vision
        self._tokenizer = tokenizer
        self._image = tokenizer.token_text(vision.image_token_id)
        self._start = tokenizer.token_text(vision.start_token_id)
        self._end = tokenizer.token_text(vision.end_token_id)

    @property
    def text(self) -> str:
        """What stands for an image in a text."""
        return self._start if self._is_framed else f"{self._start}{self._image}{self._end}"

    @property
    def _is_framed(self) -> bool:
        """Whether an image brings the tokens around it, and the token before it is its placeholder."""
        return self._vision.kind == "siglip"

    def in_text(self, text: str, images: Sequence[Processed], *, adds_special_tokens: bool) -> list[int]:
        """Return the tokens of a text with a placeholder for each image.

        Raises:
            InvalidRequest: it has more or fewer placeholders.
        """
        if not self._is_framed:
            return self.in_tokens(self._tokenizer.encode(text, adds_special_tokens), images)
        pieces = text.split(self._start)
        self._check_number(len(pieces) - 1, images)
        expanded = pieces[0] + "".join(
            self._framed(image) + piece for image, piece in zip(images, pieces[1:], strict=True)
        )
        return self._tokenizer.encode(expanded, adds_special_tokens)

    def in_tokens(self, token_ids: list[int], images: Sequence[Processed]) -> list[int]:
        """The same for a prompt of token ids. If all placeholders are expanded already, nothing changes."""
        token, num_tokens = self._vision.image_token_id, sum(image.num_tokens for image in images)
        if token_ids.count(token) == num_tokens and (self._is_framed or num_tokens != len(images)):
            return token_ids
        marker = self._vision.start_token_id if self._is_framed else token
        self._check_number(token_ids.count(marker), images)
        expanded: list[int] = []
        waiting = iter(images)
        for token_id in token_ids:
            if token_id != marker:
                expanded.append(token_id)
            elif self._is_framed:
                expanded += self._tokenizer.encode(self._framed(next(waiting)), add_special_tokens=False)
            else:
                expanded += [token] * next(waiting).num_tokens
        return self._merged_newlines(expanded) if self._is_framed else expanded

    def features(self, token_ids: list[int], images: Sequence[Processed]) -> list[Feature]:
        """Return where the images' features are among the tokens of an expanded prompt.

        Raises:
            InvalidRequest: the prompt has other tokens of images than those.
        """
        found: list[Feature] = []
        token, end = self._vision.image_token_id, 0
        for part in (part for image in images for part in image.parts):
            try:
                start = token_ids.index(token, end)
            except ValueError:
                start = len(token_ids)
            end = start + part.num_tokens
            if token_ids[start:end] != [token] * part.num_tokens:
                raise InvalidRequest("the prompt's image tokens don't fit its images")
            found.append(Feature(part.identifier, start, part.num_tokens, part.grid))
        if token in token_ids[end:]:
            raise InvalidRequest("the prompt has more image tokens than its images have")
        return found

    def _check_number(self, num_places: int, images: Sequence[Processed]) -> None:
        if num_places != len(images):
            raise InvalidRequest(
                f"the prompt has {num_places} placeholders for {len(images)} images: an image's is {self.text!r}"
            )

    def _framed(self, image: Processed) -> str:
        """Return the text that an image, or an image with crops, brings."""
        each = [f"\n\n{self._start}{self._image * part.num_tokens}{self._end}\n\n" for part in image.parts]
        if len(each) == 1:
            return each[0]
        return (
            f"Here is the original image {each[0]} and here are some crops to help you see better {' '.join(each[1:])}"
        )

    def _merged_newlines(self, token_ids: list[int]) -> list[int]:
        """Tokenize neighbouring newlines together, as in a text."""
        merged: list[int] = []
        num_newlines = 0
        for token_id in [*token_ids, -1]:
            text = self._tokenizer.token_text(token_id) if token_id >= 0 else ""
            if text and not text.strip("\n"):
                num_newlines += len(text)
                continue
            if num_newlines:
                merged += self._tokenizer.encode("\n" * num_newlines, add_special_tokens=False)
                num_newlines = 0
            merged.append(token_id)
        return merged[:-1]
