"""The interface of results that arrive later."""

from __future__ import annotations

from typing import Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """The future result of a call or a step. Calls to the same workers run in the order in which they were made."""

    def done(self) -> bool:
        """Whether `result()` would return or raise at once."""
        ...

    def result(self, timeout: float | None = None) -> T_co:
        """Wait for the result, at most `timeout` seconds and at most until the call's own deadline."""
        ...
