"""Turns a growing sequence of tokens into text, up to the stop string that ends the text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from raycore.sampling_params import SamplingParams
from raycore.text.stop_strings import StopStrings
from raycore.text.tokenizer import REPLACEMENT, Tokenizer

_LONGEST_CHARACTER = 4
"""Maximum length of a UTF-8 character in bytes."""
_WINDOW = 4
"""If the window has more tokens than this, the oldest are dropped. See `IncrementalDetokenizer`."""
_MAX_HELD = 16
"""Maximum number of tokens whose bytes are held back until a character is complete."""
_LONGEST_TAIL = 32
"""Maximum number of the prompt's tokens that are decoded with the first tokens of the output."""


class IncrementalDetokenizer:
    """Turns the growing sequence of tokens that follows a prompt into text.

    `text` is what the tokens add to the prompt's text: decoding the prompt and the tokens together gives the prompt's
    text followed by `text`. So the space before the first word is part of `text`, and if the prompt ends with the first
    bytes of a character and the tokens complete it, the character is, too.

    Bytes at the end that may be part of an incomplete character are held back, so that characters are only ever added
    to `text`. How the tokens are divided over calls of `append` doesn't change `text` after `finish()`.

    Tokenizers with byte fallback are an exception if bytes aren't valid UTF-8. Decoded at once, a whole run of bytes
    becomes U+FFFD, including characters that were complete. `text` keeps these characters, and so does the prompt's
    text, which is what this class makes of the prompt's tokens. Only U+FFFD at its end may be replaced, by the
    character with which `text` begins. What follows that character doesn't change this.

    For each new token, only the last few tokens (the window) are decoded again. The window begins between two
    characters, and its first tokens have text that has been seen before. So what decoders do only at the beginning of a
    text, such as dropping a space, doesn't affect new text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._seen = ""
        """The part of the window's text that has been seen before: in the prompt's text, or in `text`."""
        self._num_settled = 0
        """Number of tokens at the beginning of the window whose text is final."""
        self._last_boundary = 0
        """The value of `_num_settled` before the latest tokens were added to it."""
        self._is_complete = True
        """Whether no bytes of the tokens are held back."""
        self.text = ""
        self.num_replaced = 0
        """Number of U+FFFD at the end of the prompt's text that the beginning of `text` replaces."""
        self.append(self._tail_of(prompt_token_ids))
        self._seen = self._decode(self._window)
        self.text = ""

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens, and add their text to `text`."""
        if self._skip_special_tokens:
            # a long run of special tokens, which have no text, would keep the window from moving
            special_ids = self._tokenizer.special_ids
            token_ids = [token_id for token_id in token_ids if token_id not in special_ids]
        if not token_ids:
            return
        if self._is_complete and len(self._window) > _WINDOW:
            self._move_window()
        decoded = self._decode([*self._window, *token_ids])
        if len(token_ids) > 1 and self._has_broken_bytes(decoded):
            middle = len(token_ids) // 2
            self.append(token_ids[:middle])
            self.append(token_ids[middle:])
            return
        if not decoded.startswith(self._seen.rstrip(REPLACEMENT)):
            # with byte fallback: the new bytes have made earlier ones in the window unreadable
            self._window = self._window[self._num_settled :]
            self._seen = self._seen[len(self._seen.rstrip(REPLACEMENT)) :]
            self._last_boundary = self._num_settled = 0
            decoded = self._decode([*self._window, *token_ids])
        self._window += token_ids
        complete = decoded.rstrip(REPLACEMENT)
        self._is_complete = len(complete) == len(decoded)
        if self._is_complete:
            self._grow(decoded)
            self._last_boundary, self._num_settled = self._num_settled, len(self._window)
        elif len(self._window) - self._num_settled > _MAX_HELD:
            self._give_up(decoded)
        elif not self._seen.startswith(complete):
            self._grow(complete)

    def finish(self) -> None:
        """Add the bytes that are still held back to `text`. Call this after the last token."""
        if not self._is_complete:
            self._grow(self._decode(self._window))

    def _tail_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens. They have text and begin with a whole character, if possible."""
        skipped = self._tokenizer.special_ids if self._skip_special_tokens else ()
        last = (token_id for token_id in reversed(prompt_token_ids) if token_id not in skipped)
        tail: list[int] = []
        while len(tail) < _LONGEST_TAIL and (more := list(islice(last, _WINDOW))):
            tail = [*reversed(more), *tail]
            text = self._decode(tail)
            if text and not text.startswith(REPLACEMENT):
                break
        while tail and 0x80 <= (self._tokenizer.token_bytes(tail[0]) or b"\0")[0] < 0xC0:
            del tail[0]  # with byte fallback, a run that begins within a character would be unreadable
        return tail

    def _has_broken_bytes(self, decoded: str) -> bool:
        """Whether the window's text has bytes after `_seen` whose text depends on the tokens decoded with them."""
        if self._tokenizer.has_byte_fallback:
            return REPLACEMENT in decoded[len(self._seen.rstrip(REPLACEMENT)) :]
        return decoded.endswith(REPLACEMENT)

    def _grow(self, decoded: str) -> None:
        num_kept = len(_common_start(self._seen, decoded))
        if not self.text:
            self.num_replaced += len(self._seen) - num_kept
        self.text += decoded[num_kept:]
        self._seen = decoded

    def _move_window(self) -> None:
        recent = self._window[self._last_boundary :]
        seen = self._decode(recent)
        if seen:
            self._window, self._seen = recent, seen
            self._last_boundary, self._num_settled = 0, len(recent)

    def _give_up(self, decoded: str) -> None:
        """Stop holding back bytes: add them to `text`, except the last ones, which may begin a character."""
        self._grow(decoded[:-1])
        self._window = self._window[-_LONGEST_CHARACTER:]
        recent = self._decode(self._window)
        self._seen = recent[:-1]
        self._last_boundary = self._num_settled = 0
        if not recent.endswith(REPLACEMENT):
            # with byte fallback: without the bytes before them, these are a character
            self._grow(recent)
            self._is_complete, self._num_settled = True, len(self._window)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _common_start(before: str, after: str) -> str:
    """`before` without its end that `after`, the text with more tokens, no longer has: U+FFFD for half a character."""
    if after.startswith(before):
        return before
    return before[: next(at for at, character in enumerate(before) if character != after[at : at + 1])]


class SequenceText:
    """The text that one sequence adds to its prompt, up to the stop string that ends the text."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens, prompt_token_ids)
        self._stops = StopStrings(params.stop_strings)
        self._has_stops = bool(self._stops)  # asked with every token
        self._stop_after = params.stop_after
        tags = [tag for tag in (params.stop_after, params.stop_or_from) if tag is not None]
        self._tags = StopStrings(tags) if tags else None
        """Finds the end of the reasoning, in which stop strings aren't searched for. None: it has ended."""
        self._is_after_tag = False
        """Whether there has been only white space after the tag that closes the reasoning."""
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._end: int | None = None
        """The length of the text, once it is known where the text ends."""
        self.stop: str | None = None
        """The stop string that ended the text, if any."""

    def append(self, token_ids: Sequence[int]) -> int:
        """Append tokens. Returns how many of them are used: all, or those up to the end of a stop string."""
        if not self._has_stops:
            self._detokenizer.append(token_ids)
            return len(token_ids)
        for num_taken, token_id in enumerate(token_ids, 1):
            self._detokenizer.append([token_id])
            self._num_tokens += 1
            if self._search():
                return num_taken
        return len(token_ids)

    def finish(self) -> None:
        """End the text after the last token. Characters that were held back become part of it."""
        if self.stop is None:
            self._detokenizer.finish()
            self._end = len(self._detokenizer.text)

    @property
    def text(self) -> str:
        """The text so far. At its end, what may be the beginning of a stop string or of a tag is left out.

        A stop string's beginning is kept if the output includes stop strings; all is kept once the text has ended.
        """
        text = self._detokenizer.text
        if self._end is not None:
            return text[: self._end]
        if not self._has_stops:
            return text
        if self._tags is not None:
            # a stop string may begin with the tag
            return text[: len(text) - self._tags.num_held_back]
        if self._include_stop:
            return text
        return text[: len(text) - self._stops.num_held_back]

    def _search(self) -> bool:
        """Search new text for a stop string. Returns whether a stop string ends the text.

        A stop string that ends within the first `min_tokens` tokens is ignored.
        """
        text = self._detokenizer.text
        if self._tags is not None and not self._find_tag(text):
            return False
        if self._is_after_tag:
            # models write an empty line there, which must not end the output before it has begun
            new = text[self._stops.num_searched :]
            content = new.lstrip()
            self._stops.find(new[: len(new) - len(content)])
            self._is_after_tag = not content
        match = self._stops.find(text[self._stops.num_searched :])
        if match is None or self._num_tokens <= self._min_tokens:
            return False
        self.stop = match.stop
        self._end = match.start + (len(match.stop) if self._include_stop else 0)
        return True

    def _find_tag(self, text: str) -> bool:
        """Search new text for the end of the reasoning, from which on stop strings are searched for."""
        assert self._tags is not None
        match = self._tags.find(text[self._tags.num_searched :])
        if match is None:
            return False
        self._tags = None
        self._is_after_tag = match.stop == self._stop_after
        self._stops.begin_at(match.start + (len(match.stop) if self._is_after_tag else 0))
        return True
