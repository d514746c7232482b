"""The unconstrained beginning of an output: up to a tag, such as the one that closes the reasoning.

Tags are searched for in the text of the tokens, because a model may have one token for a tag or write it in several.
The constrained part must begin with a new token. Therefore tokens that complete a tag and have more text after it are
forbidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_NO_IDS = np.empty(0, np.int64)
_NUM_KEPT = 16
"""Maximum number of cached tags. A model has one or two."""


class Tag:
    """A text that ends the unconstrained part of outputs. One `Tag` serves all outputs."""

    def __init__(self, text: str, texts: Sequence[bytes], kept_ids: Sequence[int]) -> None:
        """Find the tokens that overrun the tag: those that complete the tag and have more text after it.

        Args:
            texts: the tokens' texts, by token id.
            kept_ids: the tag's token ids if the constrained part begins with the tag; otherwise empty.
        """
        self.text = text.encode()
        self.kept_ids = kept_ids
        self._overruns = _find_overruns(self.text, texts)

    def overruns(self, tail: bytes) -> list[NDArray[np.int64]]:
        """The ids of tokens that complete the tag after `tail`, the last bytes of an output, and overrun it."""
        return [ids for num_begun, ids in self._overruns.items() if tail.endswith(self.text[:num_begun])]


class FreeText:
    """Follows one output through its unconstrained part."""

    def __init__(self, tags: Sequence[Tag], texts: Sequence[bytes]) -> None:
        self._tags = tags
        self._texts = texts
        self._num_kept = max(len(tag.text) for tag in tags)
        self._tails = [b""]
        """The last bytes of the output after each of its tokens."""

    def copy(self) -> FreeText:
        """A new `FreeText` with the same tags, at the beginning of another output."""
        return FreeText(self._tags, self._texts)

    def advance(self, token_id: int) -> Tag | None:
        """Take the output's next token. If it completes a tag, returns the tag: the unconstrained part has ended."""
        tail = (self._tails[-1] + self._texts[token_id])[-self._num_kept :]
        self._tails.append(tail)
        return next((tag for tag in self._tags if tail.endswith(tag.text)), None)

    def take_back(self, num_tokens: int) -> None:
        """Return to the state before the last `num_tokens` tokens."""
        del self._tails[len(self._tails) - num_tokens :]

    def forbidden_ids(self) -> NDArray[np.int64]:
        """The ids of the tokens that must not come next."""
        found = [ids for tag in self._tags for ids in tag.overruns(self._tails[-1])]
        return np.concatenate(found) if found else _NO_IDS


class FreeTexts:
    """Creates `FreeText` objects for one tokenizer. Reads the texts of the tokenizer's tokens at the first call."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: list[bytes] = []
        self._tags: dict[tuple[str, bool], Tag] = {}

    def before(self, native: LLMatcher, after: str, or_from: str | None) -> FreeText:
        """The `FreeText` for the unconstrained text before the part that `native` constrains.

        The unconstrained text ends after the tag `after`. It also ends before the tag `or_from` if the constrained part
        may begin with that tag.
        """
        if not self._texts:
            self._texts = [self._tokenizer.decode_bytes([token_id]) for token_id in range(self._tokenizer.vocab_size)]
        tags = [self._tag(after, is_kept=False)]
        kept = None if or_from is None else self._tag(or_from, is_kept=True)
        if kept is not None and native.validate_tokens(list(kept.kept_ids)) == len(kept.kept_ids):
            tags.append(kept)
        return FreeText(tags, self._texts)

    def _tag(self, text: str, *, is_kept: bool) -> Tag:
        tag = self._tags.get((text, is_kept))
        if tag is None:
            if len(self._tags) == _NUM_KEPT:
                self._tags.clear()
            kept_ids = self._tokenizer.tokenize_str(text) if is_kept else []
            tag = self._tags[text, is_kept] = Tag(text, self._texts, kept_ids)
        return tag


def _find_overruns(tag: bytes, texts: Sequence[bytes]) -> dict[int, NDArray[np.int64]]:
    """The ids of tokens that complete the tag and have more text after it, by how many of the tag's bytes come before
    the token."""
    found: dict[int, list[int]] = {}
    last = tag[-1:]
    for token_id, text in enumerate(texts):
        if last not in text[:-1]:
            continue
        for num_begun in range(1, len(tag)):
            if len(text) > len(tag) - num_begun and text.startswith(tag[num_begun:]):
                found.setdefault(num_begun, []).append(token_id)
        if tag in text[:-1]:
            found.setdefault(0, []).append(token_id)
    return {num_begun: np.array(token_ids, np.int64) for num_begun, token_ids in found.items()}
