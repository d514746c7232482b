"""Ids of calls that have requests one after the other, and between these none."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from raycore.errors import InvalidRequest
from raycore.system import threading


class ReservedIds:
    """The ids of one client that belong to such calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on_end: dict[str, Callable[[BaseException | None], object]] = {}
        self._failure: BaseException | None = None

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._on_end

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._on_end))

    @contextmanager
    def reserve(self, request_id: str, on_end: Callable[[BaseException | None], object]) -> Generator[None, None, None]:
        """Keep an id for the time of the context.

        Args:
            on_end: called on any thread once the call is aborted, with None, or once the engine has failed, with its
                failure. Must not block.

        Raises:
            InvalidRequest: another call has the id.
        """
        with self._lock:
            if request_id in self._on_end:
                raise InvalidRequest(f"request_id={request_id!r} is already in use")
            self._on_end[request_id] = on_end
            failure = self._failure
        try:
            if failure is not None:
                on_end(failure)
            yield
        finally:
            with self._lock:
                del self._on_end[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the calls that have these ids. Ignores others."""
        with self._lock:
            found = [self._on_end[each] for each in request_ids if each in self._on_end]
        for on_end in found:
            on_end(None)

    def fail(self, error: BaseException) -> None:
        """Tell all calls, and those that come later, that the engine has failed."""
        with self._lock:
            self._failure = error
            found = list(self._on_end.values())
        for on_end in found:
            on_end(error)
