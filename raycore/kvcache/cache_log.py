"""What has happened to a rank's prefix cache, for clients that route requests by it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from raycore.messages import CacheChanges
from raycore.system import threading

_MAX_ENTRIES = 1 << 16
"""A client that is behind by more is told everything anew."""


class CacheLog:
    """The digests in the prefix cache, and the last changes. The engine's loop adds to it, other threads read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[bytes, None] = {}
        self._entries: deque[tuple[bytes, bool]] = deque()
        """(digest, whether it was stored) of the last changes."""
        self._end = 0
        """Number of changes since the start."""
        self._identity = b""

    def stored(self, digests: Iterable[bytes]) -> None:
        """Note blocks that the cache has got."""
        with self._lock:
            for digest in digests:
                self._held[digest] = None
                self._add(digest, is_stored=True)

    def removed(self, digests: Iterable[bytes]) -> None:
        """Note blocks that the cache has lost."""
        with self._lock:
            for digest in digests:
                self._held.pop(digest, None)
                self._add(digest, is_stored=False)

    def cleared(self) -> None:
        """Note that the cache has lost all blocks."""
        with self._lock:
            self._clear()

    def take_identity(self, identity: bytes) -> None:
        """Note what digests begin with from now on. The cache has no others any more."""
        with self._lock:  # nobody is told of the others with this identity
            self._identity = identity
            self._clear()

    def since(self, position: int) -> tuple[CacheChanges | None, int]:
        """Return what has happened since `position`, and the position that comes next. At first, `position` is -1."""
        if position == self._end:
            return None, position
        with self._lock:
            if position < self._end - len(self._entries):
                is_new = position < 0 and not (self._held or self._identity)
                changes = CacheChanges(b"".join(self._held), is_whole=True, identity=self._identity)
                return None if is_new else changes, self._end
            last: dict[bytes, bool] = {}
            for index in range(position - self._end, 0):
                digest, is_stored = self._entries[index]
                last[digest] = is_stored
            stored = b"".join(digest for digest, is_stored in last.items() if is_stored)
            removed = b"".join(digest for digest, is_stored in last.items() if not is_stored)
            return CacheChanges(stored, removed), self._end

    def _clear(self) -> None:
        self._held.clear()
        self._entries.clear()
        self._end += 1

    def _add(self, digest: bytes, *, is_stored: bool) -> None:
        self._entries.append((digest, is_stored))
        self._end += 1
        if len(self._entries) > _MAX_ENTRIES:
            self._entries.popleft()
