"""Searches a growing text for stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string that was found."""

    stop: str
    start: int
    """The index in the text at which the stop string starts."""


class StopStrings:
    """Searches a growing text for one request's stop strings, each with the Knuth-Morris-Pratt algorithm."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(stop, _borders(stop)) for stop in stops]
        self._num_matched = [0] * len(stops)
        """For each stop string, the length of its longest prefix with which the text ends."""
        self.num_searched = 0
        """Number of characters of the text so far."""

    def __bool__(self) -> bool:
        return bool(self._stops)

    def begin_at(self, position: int) -> None:
        """Begin the search at this position of the text. Matches before it are not found."""
        self.num_searched = position

    def find(self, new: str) -> StopMatch | None:
        """Append `new` to the text. Of the matches that end within `new`, returns the one that starts first."""
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
        """Number of characters at the end of the text that may be the beginning of a stop string."""
        return max(self._num_matched, default=0)


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Knuth-Morris-Pratt failure function: for each prefix of `stop`, the length of its longest proper border."""
    borders = [0, 0]
    for character in stop[1:]:
        length = borders[-1]
        while length and stop[length] != character:
            length = borders[length]
        borders.append(length + (stop[length] == character))
    return tuple(borders)
