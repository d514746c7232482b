"""Decides when a loop logs what it finds again and again: once, again when it has changed, and otherwise rarely."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from raycore.system import time

_MAX_SAID = 16
"""How many different states are remembered."""


class Recurring:
    """A condition that lasts, such as a disk that is full, as a loop finds it each time. Each loop has its own.

    It is due when it begins. While it stays the same, it is due again after `first_s` seconds, then after twice that
    time, and so on, up to `longest_s`. A state that is new is due at once, but not within `least_s` seconds of the last
    message, so that a condition that changes all the time isn't logged all the time.
    """

    def __init__(
        self,
        first_s: float = 600.0,
        longest_s: float = 3600.0,
        least_s: float = 10.0,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._least_s = least_s
        self._now_s = now_s
        self._next_s: float | None = None
        """The earliest time of the next message; None before the first."""
        self._said: dict[Hashable, tuple[float, float]] = {}
        """When a state is due again, and the interval after that, by state. The one logged last is the last."""

    def is_due(self, state: Hashable = None) -> bool:
        """Whether to log the condition now. `state`: what tells its states apart."""
        now_s = self._now_s()
        due_s, interval_s = self._said.get(state, (now_s, self._first_s))
        if now_s < due_s or (self._next_s is not None and now_s < self._next_s):
            return False
        self._next_s = now_s + self._least_s
        self._said.pop(state, None)
        self._said[state] = now_s + interval_s, min(2 * interval_s, self._longest_s)
        if len(self._said) > _MAX_SAID:
            del self._said[next(iter(self._said))]
        return True

    def end(self) -> bool:
        """Note that the condition is over. Returns whether it was logged since it began."""
        was_said, self._next_s = self._next_s is not None, None
        self._said.clear()
        return was_said
