"""A cache of values by name, bounded by the sum of their sizes. The least recently used ones give way."""

from __future__ import annotations

from typing import Generic, TypeVar

_ValueT = TypeVar("_ValueT")


class LruBytes(Generic[_ValueT]):
    """Values by name, of at most `capacity` bytes together. Not thread-safe."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: dict[str, tuple[_ValueT, int]] = {}
        """The least recently used one first."""
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def get(self, name: str) -> _ValueT | None:
        """Return a value, which is now the most recently used one. None: it isn't there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return None
        self._entries[name] = entry
        return entry[0]

    def put(self, name: str, value: _ValueT, size: int) -> None:
        """Add a value of `size` bytes, or replace the one of this name. One larger than the cache isn't kept."""
        self.discard(name)
        if size > self._capacity:
            return
        self._entries[name] = value, size
        self.num_bytes += size
        while self.num_bytes > self._capacity:
            self.discard(next(iter(self._entries)))

    def discard(self, name: str) -> None:
        """Remove a value, if it is there."""
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.num_bytes -= entry[1]

    def clear(self) -> None:
        """Remove all values."""
        self._entries.clear()
        self.num_bytes = 0
