"""Finds where the last tokens of a sequence have occurred before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Match(NamedTuple):
    """An earlier occurrence of a sequence's last tokens."""

    end: int
    """The position after the occurrence: of the token that came next then."""
    length: int
    """How many tokens are the same, up to a limit."""


class Occurrences:
    """A growing sequence, and where each run of `length` tokens has occurred in it.

    The positions of equal runs form a chain, from the latest back to the first one, as in LZ77.
    """

    def __init__(self, length: int) -> None:
        self.tokens: list[int] = []
        self._length = length
        self._latest: dict[tuple[int, ...], int] = {}
        """By run: the position after its latest occurrence."""
        self._earlier: list[int] = [0]
        """By the position after a run: the position after the occurrence before. 0: there is none."""

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens."""
        known, length, latest, earlier = self.tokens, self._length, self._latest, self._earlier
        known += tokens
        for end in range(len(earlier), len(known) + 1):
            # the first runs of the sequence are shorter
            run = tuple(known[max(0, end - length) : end])
            earlier.append(latest.get(run, 0))
            latest[run] = end

    def last(self) -> Iterator[int]:
        """Yield the positions after earlier occurrences of the last run of this sequence, the latest first."""
        return self._chain(self._earlier[-1])

    def of(self, run: tuple[int, ...]) -> Iterator[int]:
        """Yield the positions after the occurrences of `run`, the latest first."""
        return self._chain(self._latest.get(run, 0))

    def match(self, end: int, suffix: list[int], longest: int) -> Match:
        """Return the match between `suffix` and the tokens before `end`, whose last run is the same.

        `longest`: more tokens than this aren't compared.
        """
        length = self._length
        limit = min(longest, end, len(suffix))
        tokens = self.tokens
        while length < limit and tokens[end - length - 1] == suffix[-length - 1]:
            length += 1
        return Match(end, length)

    def after(self, end: int, num_tokens: int) -> list[int]:
        """Return the tokens from position `end` on. After the sequence's last one, it is taken to repeat from there."""
        found = self.tokens[end : end + num_tokens]
        period = len(self.tokens) - end
        while period and len(found) < num_tokens:
            found.append(found[-period])
        return found

    def _chain(self, end: int) -> Iterator[int]:
        while end:
            yield end
            end = self._earlier[end]
