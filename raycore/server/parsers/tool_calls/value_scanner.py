"""Finds the end of a parameter's value between tags, in text that arrives in pieces. Pure.

The value is plain text, so it may contain the tags themselves, and models sometimes leave out tags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple


class ValueTags(NamedTuple):
    """The tags of a format that matter to where a value ends."""

    tag: re.Pattern[str]
    """Matches any of them. Group 1 is the name, if the tag begins another parameter."""
    begun: re.Pattern[str]
    """Matches at the end of a text what `tag` might match if the text went on."""
    end: str
    """The tag after each value."""
    function: str
    """What a tag that begins a function begins with."""
    end_function: str
    """The tag that ends a function."""
    after: Mapping[str, tuple[str, ...]]
    """What can follow a tag that ends a value, by the tag. If something else follows, the tag belongs to the value."""


class ValueScanner:
    """Finds the tag that ends a value: `tags.end` or, if that is missing, the next tag of the call.

    A complete function within a value, from its first to its last tag, belongs to the value.
    """

    def __init__(self, tags: ValueTags, may_begin: Callable[[str], bool], nests: bool = True) -> None:
        """
        Args:
            tags: the format's.
            may_begin: whether another parameter, with this name, may begin while the end of this one is missing.
            nests: whether the value may contain complete functions.
        """
        self._tags = tags
        self._may_begin = may_begin
        self._nests = nests
        self._position = 0
        """Up to where the text has been scanned."""
        self._depth = 0
        """How many functions have begun within the value."""
        self._has_nested = False

    def find(self, text: str, is_last: bool) -> int | None:
        """Where the value ends; None if more text is needed or, if `is_last`, if no tag ends the value.

        `text` begins with the value. It is the whole text so far.
        """
        while (tag := self._tags.tag.search(text, self._position)) is not None:
            ends = self._ends(tag, text, is_last)
            if ends is None:
                return None
            if ends:
                return tag.start()
            self._position = tag.end()
        begun = self._tags.begun.search(text, self._position)
        self._position = len(text) if begun is None else begun.start()
        return None

    def _ends(self, tag: re.Match[str], text: str, is_last: bool) -> bool | None:
        """Whether a tag ends the value; None if that isn't certain yet."""
        if tag[0].startswith(self._tags.function):
            self._depth += self._nests
            self._has_nested |= self._nests
            return False
        if self._depth:
            self._depth -= tag[0] == self._tags.end_function
            return False
        if tag[0] != self._tags.end:
            # if the value begins a line in the model's own layout, each tag does
            is_in_line = text.startswith("\n") and not text[: tag.start()].rstrip(" ").endswith("\n")
            # the tag may also end this call, if the value only seemed to contain another one
            if is_in_line or self._has_nested:
                return False
        if tag[1] is not None:
            return self._may_begin(tag[1].strip())
        rest = text[tag.end() :].lstrip()
        if any(rest.startswith(following) for following in self._tags.after[tag[0]]):
            return True
        if any(following.startswith(rest) for following in self._tags.after[tag[0]]):
            return True if is_last else None
        return False


def find_last_end(text: str, tags: ValueTags, may_begin: Callable[[str], bool], is_cut_off: bool) -> int | None:
    """Where a value ends if the message ends before a `ValueScanner` has found its end; None if it is cut off.

    A function's tag in the value then didn't begin anything. If that doesn't help, the value ends before the first tag
    that might end it, whatever follows the tag.
    """
    end = ValueScanner(tags, may_begin, nests=False).find(text, is_last=True)
    if end is not None or is_cut_off:
        return end
    return min((found for tag in tags.after if (found := text.find(tag)) >= 0), default=len(text))
