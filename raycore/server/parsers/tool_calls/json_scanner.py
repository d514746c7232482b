"""Finds the end of a JSON value in text that arrives in pieces. Pure."""

from __future__ import annotations

import re

_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_ANYTHING = re.compile(r'[^"{}\[\]]*')
_ANYTHING_BUT_TAGS = re.compile(r'[^"{}\[\]<]*')
_LEGAL = re.compile(r"[\s\w:,.+-]*")
"""Matches what valid JSON may contain outside of strings, except brackets."""
_LEGAL_OUTSIDE = re.compile(r"[\s\w.+-]*")
"""The same outside of brackets."""


class JsonScanner:
    """Finds the end by following strings and brackets only. Does not check whether the value is valid JSON."""

    def __init__(self, position: int = 0, *, until: str | None = None, strict: bool = False, depth: int = 0) -> None:
        """Begin at `position` in the text.

        Args:
            until: a tag that also ends the value, unless the tag is in a string.
            strict: also end after a string, before a comma, and at a character that is not allowed in JSON outside of
                strings, where these aren't within brackets.
            depth: how many brackets are open at the beginning. The value ends after they are closed.
        """
        self.position = position
        """Up to where the text has been scanned. Once the value has ended: where it ends."""
        self.is_broken = False
        """Whether the scan ended because the value is not JSON."""
        self._until = until
        self._strict = strict
        self._in_string = False
        self._depth = depth

    def advance(self, text: str) -> bool:
        """Scan the text from `position`. `text` is the whole text so far. Returns whether the value has ended.

        The value ends after its last bracket, or before a bracket that closes the object or array around it.
        """
        while self.position < len(text):
            self.position = _end(self._plain(), text, self.position)
            if self.position == len(text):
                return False
            character = text[self.position]
            if self._in_string:
                if character == "\\":
                    return False  # the character that the backslash escapes hasn't arrived yet
                self._in_string = False
                self.position += 1
                if self._strict and self._depth == 0:
                    return True
                continue
            if self._until is not None and self._until[0] == character:
                if text.startswith(self._until, self.position):
                    return True
                if self._until.startswith(text[self.position :]):
                    return False
            if self._take(character):
                return True
        return False

    def _plain(self) -> re.Pattern[str]:
        """Matches what can be skipped."""
        if self._in_string:
            return _STRING
        if self._strict:
            return _LEGAL if self._depth else _LEGAL_OUTSIDE
        return _ANYTHING if self._until is None else _ANYTHING_BUT_TAGS

    def _take(self, character: str) -> bool:
        """Go past a character outside of strings. Returns whether the value ends there."""
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            if self._depth == 0:
                return True
            self._depth -= 1
        elif self._strict:
            self.is_broken = character != "," or self._depth > 0
            return True
        self.position += 1
        return self._depth == 0 and character in "}]"


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
