"""Finds the end of a JSON value in text that arrives in pieces. Pure."""

from __future__ import annotations

import re

_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_ANYTHING = re.compile(r'[^"{}\[\]]*')
_ANYTHING_BUT_TAGS = re.compile(r'[^"{}\[\]<]*')
_LEGAL = re.compile(r"[\s\w:,.+-]*")
"""Matches what valid JSON may contain outside of strings, except brackets."""


class JsonScanner:
    """Finds the end by following strings and brackets only. Does not check whether the value is valid JSON."""

    def __init__(self, position: int = 0, *, until: str | None = None, strict: bool = False) -> None:
        """Begin at `position` in the text.

        Args:
            until: a tag that also ends the value, unless the tag is in a string.
            strict: also end at a character that is not allowed in JSON outside of strings.
        """
        self.position = position
        """Up to where the text has been scanned. Once the value has ended: where it ends."""
        self.is_broken = False
        """Whether the scan ended because the value is not JSON."""
        self._until = until
        self._strict = strict
        self._plain = _LEGAL if strict else _ANYTHING if until is None else _ANYTHING_BUT_TAGS
        self._in_string = False
        self._depth = 0

    def advance(self, text: str) -> bool:
        """Scan the text from `position`. `text` is the whole text so far. Returns whether the value has ended.

        The value ends after its last bracket, or before a bracket that closes the object or array around it.
        """
        while self.position < len(text):
            self.position = _end(_STRING if self._in_string else self._plain, text, self.position)
            if self.position == len(text):
                return False
            character = text[self.position]
            if character == "\\" and self._in_string:
                return False  # the character that the backslash escapes hasn't arrived yet
            if character == "<" and self._until is not None and not self._in_string:
                if text.startswith(self._until, self.position):
                    return True
                if self._until.startswith(text[self.position :]):
                    return False
            if character == '"':
                self._in_string = not self._in_string
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth < 0:
                    return True
            elif self._strict:
                self.is_broken = True
                return True
            self.position += 1
            if self._depth == 0 and character in "}]":
                return True
        return False


def _end(pattern: re.Pattern[str], text: str, position: int) -> int:
    match = pattern.match(text, position)
    assert match is not None, "the pattern matches the empty string"
    return match.end()
