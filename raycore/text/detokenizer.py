"""Incremental detokenization, and the search for stop strings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
"""Maximum length of a UTF-8 character in bytes."""
_WINDOW = 4
"""Tokens that are decoded together before the oldest are dropped."""
_MAX_HELD = 16
"""Tokens whose bytes may wait for the end of a character. The bytes of more tokens can't be one character."""


class IncrementalDetokenizer:
    """The text of a growing sequence of tokens.

    Bytes that may still become a character are held back, so that the text only ever grows. At the end it equals the
    text of all tokens decoded at once. (With tokenizers that fall back to bytes this isn't always so for bytes that
    aren't UTF-8: they turn a whole run into U+FFFD, including characters that were already complete.)

    Only the last few tokens are decoded again for each new one. They begin at a boundary between characters and with
    text, so that what decoders do at the beginning of a text, such as dropping a space, isn't done in its middle.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._num_settled = 0
        """Tokens of the window whose text is final."""
        self._last_boundary = 0
        """`_num_settled` before the latest tokens."""
        self._seen = ""
        """The part of the window's text that is already in `text`."""
        self.text = ""

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens."""
        if self._skip_special_tokens:
            # a long run of special tokens would keep the window from moving on
            special_ids = self._tokenizer.special_ids
            token_ids = [token_id for token_id in token_ids if token_id not in special_ids]
            if not token_ids:
                return
        decoded = self._decode([*self._window, *token_ids])
        complete = decoded.rstrip(_REPLACEMENT)
        if len(complete) < len(decoded) and len(token_ids) > 1:
            for token_id in token_ids:
                self.append([token_id])
            return
        self._window += token_ids
        if len(complete) == len(decoded):
            self._grow(decoded)
            self._last_boundary, self._num_settled = self._num_settled, len(self._window)
            if len(self._window) > _WINDOW:
                self._move_window()
        elif len(self._window) - self._num_settled > _MAX_HELD:
            self._give_up(decoded)
        elif len(complete) > len(self._seen):
            self._grow(complete)

    def finish(self) -> None:
        """End the text. Bytes that were held back become part of it."""
        self._grow(self._decode(self._window))

    def _grow(self, decoded: str) -> None:
        self.text += decoded[len(self._seen) :]
        self._seen = decoded

    def _move_window(self) -> None:
        recent = self._window[self._last_boundary :]
        seen = self._decode(recent)
        if seen:
            self._window, self._seen = recent, seen
            self._last_boundary, self._num_settled = 0, len(recent)

    def _give_up(self, decoded: str) -> None:
        """Settle bytes that have waited too long, except the last ones, which may still begin a character."""
        self._grow(decoded[:-1])
        self._window = self._window[-_LONGEST_CHARACTER:]
        self._seen = self._decode(self._window)[:-1]
        self._last_boundary, self._num_settled = 0, len(self._window)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


class StopMatch(NamedTuple):
    """A stop string that was found."""

    stop: str
    start: int
    """Its position in the text."""


class StopStrings:
    """Searches a growing text for one request's stop strings, each with the Knuth-Morris-Pratt algorithm."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._num_matched = [0] * len(stops)
        """By stop string: the length of its longest prefix that the text ends with."""
        self.num_searched = 0
        """Characters of the text so far."""

    def __bool__(self) -> bool:
        return bool(self._stops)

    def find(self, new: str) -> StopMatch | None:
        """Append `new` to the text. Returns the match with the earliest start of those that end in `new`."""
        found: StopMatch | None = None
        for index, (stop, borders) in enumerate(self._stops):
            num_matched = self._num_matched[index]
            for end, character in enumerate(new, self.num_searched + 1):
                while num_matched and stop[num_matched] != character:
                    num_matched = borders[num_matched]
                if stop[num_matched] == character:
                    num_matched += 1
                if num_matched == len(stop):
                    start = end - num_matched
                    if found is None or start < found.start:
                        found = StopMatch(stop, start)
                    num_matched = borders[num_matched]
            self._num_matched[index] = num_matched
        self.num_searched += len(new)
        return found

    @property
    def num_held_back(self) -> int:
        """Characters at the end of the text that may begin a stop string."""
        return max(self._num_matched, default=0)


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Knuth-Morris-Pratt failure function: the length of the longest proper border of each prefix of `stop`."""
    borders = [0, 0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length]
        borders.append(length + (stop[length] == character))
    return tuple(borders)


class SequenceText:
    """The text of one sequence, up to the stop string that ends it."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens)
        self._stops = StopStrings(params.stop_strings)
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._end: int | None = None
        """Where the text ends, once that is known."""
        self.stop: str | None = None
        """The stop string that ended the text."""

    def append(self, token_ids: Sequence[int]) -> int:
        """Append tokens. Returns how many were used: all, unless a stop string ended the text."""
        if not self._stops:
            self._detokenizer.append(token_ids)
            return len(token_ids)
        for num_taken, token_id in enumerate(token_ids, 1):
            self._detokenizer.append([token_id])
            self._num_tokens += 1
            if self._search():
                return num_taken
        return len(token_ids)

    def finish(self) -> None:
        """End the text."""
        if self.stop is None:
            self._detokenizer.finish()
            self._end = len(self._detokenizer.text)

    @property
    def text(self) -> str:
        """The text so far, without an end that may begin a stop string."""
        text = self._detokenizer.text
        if self._end is not None:
            return text[: self._end]
        if self._include_stop or not self._stops:
            return text
        return text[: len(text) - self._stops.num_held_back]

    def _search(self) -> bool:
        """Search the new text for a stop string. One that ends within the first `min_tokens` tokens is ignored."""
        match = self._stops.find(self._detokenizer.text[self._stops.num_searched :])
        if match is None or self._num_tokens <= self._min_tokens:
            return False
        self.stop = match.stop
        self._end = match.start + (len(match.stop) if self._include_stop else 0)
        return True
