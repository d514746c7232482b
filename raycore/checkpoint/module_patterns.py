"""Values for modules by patterns of their names, as `rank_pattern` and `alpha_pattern` of PEFT's adapters have them.

A pattern is a regular expression for the end of a module's name, from the name's beginning or a dot on. The first one
that matches counts. Patterns come with adapters, and Python's `re` can take years for a pattern of a few characters. So
this module matches them itself: it follows all positions in the name that a part of the pattern can lead to, so the
time is at most the product of both lengths. It knows the syntax that such patterns need: characters, classes, groups,
alternatives, and repeated characters.
"""

from __future__ import annotations

__all__ = ["InvalidPattern", "ModuleValues"]

import re
import string
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")
_Ends = Callable[["_Name", int], int]
"""Where in a name a part of a pattern can end, if it begins at one of these positions. The lowest bit of positions is
that before the name's first character."""

_MAX_PATTERNS = 1024
_MAX_EXPRESSION_CHARACTERS = 1024
"""Maximum of all patterns together that are more than a name."""
_MAX_DEPTH = 8
_DOT = frozenset(".")
_ALPHABET = string.ascii_letters + string.digits + "_."
_PLAIN = re.compile(r"[A-Za-z0-9_.]+")
_CHARACTER = re.compile(r"\\[^A-Za-z0-9]|\\[dDsSwW]|\[\^?\]?(?:\\[^A-Za-z0-9]|\\[dDsSwW]|[^][\\])*\]|[^][\\(){}|*+?^$]")
_TIMES = re.compile(r"(?:([*+?])|\{([0-9]{1,2})(?:(,)([0-9]{0,2}))?\})\??")
_TIMES_OF_SIGN = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class InvalidPattern(ValueError):
    """A pattern has other syntax than this module knows, or there are too many. The message says what is possible."""


class ModuleValues(Generic[T]):
    """Values for modules, each for the modules that a pattern matches, and one for all others."""

    def __init__(self, values: Mapping[str, T], default: T) -> None:
        """Raises InvalidPattern."""
        if len(values) > _MAX_PATTERNS:
            raise InvalidPattern(f"at most {_MAX_PATTERNS} patterns")
        expressions = [pattern for pattern in values if not _PLAIN.fullmatch(pattern)]
        if sum(map(len, expressions)) > _MAX_EXPRESSION_CHARACTERS:
            raise InvalidPattern(f"regular expressions of at most {_MAX_EXPRESSION_CHARACTERS} characters together")
        self._values = [(_matcher(pattern), value) for pattern, value in values.items()]
        self._default = default

    def of(self, module: str) -> T:
        """Return the value for a module, whose name consists of letters, digits, underscores and dots."""
        return next((value for matches, value in self._values if matches(module)), self._default)


def _matcher(pattern: str) -> Callable[[str], bool]:
    if _PLAIN.fullmatch(pattern):
        return lambda name: _is_end(pattern, name)
    ends = _Parser(pattern).parse()

    def matches(text: str) -> bool:
        name = _Name(text)
        return bool(ends(name, 1 | name.where(_DOT) << 1) & name.end)

    return matches


def _is_end(pattern: str, name: str) -> bool:
    """Match a pattern in which only dots, for any character, aren't characters themselves. The usual pattern is one."""
    start = len(name) - len(pattern)
    if start < 0 or (start and name[start - 1] != "."):
        return False
    return name.endswith(pattern) or all(
        each in (".", found) for each, found in zip(pattern, name[start:], strict=True)
    )


class _Name:
    """A module's name, while it is matched."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._found: dict[frozenset[str], int] = {}
        self.end = 1 << len(text)
        """The position behind the last character."""

    def where(self, characters: frozenset[str]) -> int:
        """Return the positions before one of these characters."""
        if characters not in self._found:
            found = (1 << at for at, each in enumerate(self._text) if each in characters)
            self._found[characters] = sum(found)
        return self._found[characters]


class _Parser:
    """Makes a function of a regular expression. It goes through the expression once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0

    def parse(self) -> _Ends:
        ends = self._alternatives()
        if self._at < len(self._pattern):
            raise self._error()
        return ends

    def _alternatives(self) -> _Ends:
        found = [self._sequence()]
        while self._takes("|"):
            found.append(self._sequence())

        def all_ends(name: _Name, starts: int) -> int:
            reached = 0
            for ends in found:
                reached |= ends(name, starts)
            return reached

        return all_ends

    def _sequence(self) -> _Ends:
        parts: list[_Ends] = []
        while self._at < len(self._pattern) and self._pattern[self._at] not in "|)":
            parts.append(self._part())

        def ends(name: _Name, starts: int) -> int:
            for part in parts:
                starts = part(name, starts)
            return starts

        return ends

    def _part(self) -> _Ends:
        if self._takes("^"):
            return lambda name, starts: starts & 1
        if self._takes("$"):
            return lambda name, starts: starts & name.end
        if self._takes("(?:") or self._takes("("):
            return self._rest_of_group()
        found = _CHARACTER.match(self._pattern, self._at)
        if found is None:
            raise self._error()
        self._at = found.end()
        accepted = self._accepted(found[0])
        low, high = self._times()
        return lambda name, starts: _repeated(name.where(accepted), low, high, starts)

    def _rest_of_group(self) -> _Ends:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error()
        ends = self._alternatives()
        if not self._takes(")"):
            raise self._error()
        self._depth -= 1
        if self._takes("?"):
            self._takes("?")  # prefers no group, which doesn't change what matches
            return lambda name, starts: starts | ends(name, starts)
        return ends

    def _accepted(self, character: str) -> frozenset[str]:
        """Return the characters that one character of the pattern, or one class, stands for."""
        try:
            expression = re.compile(character)
        except re.error as error:
            raise self._error() from error
        return frozenset(filter(expression.fullmatch, _ALPHABET))

    def _times(self) -> tuple[int, int | None]:
        """Return how often the character may occur: at least, and at most."""
        found = _TIMES.match(self._pattern, self._at)
        if found is None:
            return 1, 1
        self._at = found.end()
        sign, low, has_range, high = found.groups()
        if sign:
            return _TIMES_OF_SIGN[sign]
        least = int(low)
        most = None if has_range and not high else int(high or low)
        if most is not None and most < least:
            raise self._error()
        return least, most

    def _takes(self, text: str) -> bool:
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) * found
        return found

    def _error(self) -> InvalidPattern:
        return InvalidPattern(
            "a module's name, or a regular expression of characters, classes, groups, alternatives and repeated "
            f"characters: at character {self._at} is something else"
        )


def _repeated(where: int, low: int, high: int | None, starts: int) -> int:
    """Return the ends of characters that are repeated `low` to `high` times. None: any number of times.

    `where`: the positions before one of these characters.
    """
    reached = 0 if low else starts
    times = 0
    while starts and (high is None or times < high):
        starts = (starts & where) << 1
        times += 1
        if times >= low:
            starts &= ~reached
            reached |= starts
    return reached
