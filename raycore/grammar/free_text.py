"""The beginning of an output that no grammar holds: up to a mark, such as the end of a thought.

Marks are looked for in the text that tokens spell, since a model may have a token for one or write it in pieces. What
follows a mark begins with a token of its own: tokens that would go on behind the mark are forbidden.
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
"""Marks to remember: a model has one or two."""


class Mark:
    """A text that ends what is free. Shared by all outputs."""

    def __init__(self, text: str, texts: Sequence[bytes], kept_ids: Sequence[int]) -> None:
        """
        Args:
            texts: the tokens', by id.
            kept_ids: tokens that spell the mark, where it is the first of what follows; else none.
        """
        self.text = text.encode()
        self.kept_ids = kept_ids
        self._overruns = _find_overruns(self.text, texts)

    def overruns(self, tail: bytes) -> list[NDArray[np.int64]]:
        """Tokens that complete the mark and go on, behind a text that ends with `tail`."""
        return [ids for num_begun, ids in self._overruns.items() if tail.endswith(self.text[:num_begun])]


class FreeText:
    """Follows one output through its free part."""

    def __init__(self, marks: Sequence[Mark], texts: Sequence[bytes]) -> None:
        self._marks = marks
        self._texts = texts
        self._num_kept = max(len(mark.text) for mark in marks)
        self._tail = b""

    def copy(self) -> FreeText:
        """The same for another output."""
        return FreeText(self._marks, self._texts)

    def advance(self, token_id: int) -> Mark | None:
        """Go on behind this token. Returns the mark that it completes: then the free part is over."""
        self._tail = (self._tail + self._texts[token_id])[-self._num_kept :]
        return next((mark for mark in self._marks if self._tail.endswith(mark.text)), None)

    def forbidden_ids(self) -> NDArray[np.int64]:
        """Tokens that may not come next."""
        found = [ids for mark in self._marks for ids in mark.overruns(self._tail)]
        return np.concatenate(found) if found else _NO_IDS


class FreeTexts:
    """Makes them, for one tokenizer. Reads all of its tokens when the first is asked for."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts: list[bytes] = []
        self._marks: dict[tuple[str, bool], Mark] = {}

    def before(self, native: LLMatcher, after: str, or_from: str | None) -> FreeText:
        """What comes before an output of `native`, ending behind `after`, or before `or_from` where it may begin so."""
        if not self._texts:
            self._texts = [self._tokenizer.decode_bytes([token_id]) for token_id in range(self._tokenizer.vocab_size)]
        marks = [self._mark(after, is_kept=False)]
        kept = None if or_from is None else self._mark(or_from, is_kept=True)
        if kept is not None and native.validate_tokens(list(kept.kept_ids)) == len(kept.kept_ids):
            marks.append(kept)
        return FreeText(marks, self._texts)

    def _mark(self, text: str, *, is_kept: bool) -> Mark:
        mark = self._marks.get((text, is_kept))
        if mark is None:
            if len(self._marks) == _NUM_KEPT:
                self._marks.clear()
            kept_ids = self._tokenizer.tokenize_str(text) if is_kept else []
            mark = self._marks[text, is_kept] = Mark(text, self._texts, kept_ids)
        return mark


def _find_overruns(mark: bytes, texts: Sequence[bytes]) -> dict[int, NDArray[np.int64]]:
    """Tokens that complete the mark and go on, by how many of its bytes have to stand before them."""
    found: dict[int, list[int]] = {}
    last = mark[-1:]
    for token_id, text in enumerate(texts):
        if last not in text[:-1]:
            continue
        for num_begun in range(1, len(mark)):
            if len(text) > len(mark) - num_begun and text.startswith(mark[num_begun:]):
                found.setdefault(num_begun, []).append(token_id)
        if mark in text[:-1]:
            found.setdefault(0, []).append(token_id)
    return {num_begun: np.array(token_ids, np.int64) for num_begun, token_ids in found.items()}
