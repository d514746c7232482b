"""The interface of results that arrive later."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Callback = Callable[[Any], object]
"""Called with a pending result that is done."""


class Pending(Protocol[T_co]):
    """The future result of a call or a step. Calls to the same workers run in the order in which they were made."""

    def done(self) -> bool:
        """Whether `result()` would return or raise at once."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the result, at most `timeout` seconds and at most until the call's own deadline."""
        ...


class PendingCall(Pending[T_co], Protocol[T_co]):
    """What an executor returns for a call or a step."""

    def add_done_callback(self, callback: Callback) -> None:
        """Have `callback` called once, with this object, when it is done. At once, on this thread, if it is done.

        Otherwise the thread calls it that notices the end: one that is in `result()` or `done()` of this call or, with
        worker actors, of any call to the same workers. No thread notices by itself. So a callback must not block, and
        if nobody asks for results, it isn't called. What it raises is logged.
        """
        ...


def run_callbacks(pending: object, callbacks: deque[Callback]) -> None:
    """Remove and call the callbacks of a result that is done. Several threads may do this together."""
    while callbacks:
        try:
            callback = callbacks.popleft()
        except IndexError:
            return  # another thread took the last one
        try:
            callback(pending)
        except Exception:  # as concurrent.futures does: the caller of result() has nothing to do with it
            logger.exception("a callback of a pending call failed")


class Finished(Generic[T]):
    """A `PendingCall` that is already done, with a value or an error."""

    def __init__(self, value: T | None, error: Exception | None = None) -> None:
        self._value = value
        self._error = error

    def done(self) -> bool:
        """Return True."""
        return True

    def add_done_callback(self, callback: Callback) -> None:
        """Call `callback` at once."""
        run_callbacks(self, deque([callback]))

    def result(self, timeout: float | None = None) -> T:
        """The value. Raises the error if the call failed."""
        if self._error is not None:
            raise self._error
        return self._value  # pyright: ignore[reportReturnType]
