"""Ids of calls that have requests one after the other, and between these none."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager

from raycore.errors import InvalidRequest


class ReservedIds:
    """The ids of one client that belong to such calls. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._on_abort: dict[str, Callable[[], object]] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._on_abort

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(list(self._on_abort))

    @contextmanager
    def reserve(self, request_id: str, on_abort: Callable[[], object]) -> Generator[None, None, None]:
        """Keep an id for the time of the context. `on_abort`: called on any thread. Must not block.

        Raises:
            InvalidRequest: another call has the id.
        """
        with self._lock:
            if request_id in self._on_abort:
                raise InvalidRequest(f"request_id={request_id!r} is already in use")
            self._on_abort[request_id] = on_abort
        try:
            yield
        finally:
            with self._lock:
                del self._on_abort[request_id]

    def abort(self, request_ids: Iterable[str]) -> None:
        """Tell the calls that have these ids. Ignores others."""
        with self._lock:
            found = [self._on_abort[each] for each in request_ids if each in self._on_abort]
        for on_abort in found:
            on_abort()
