"""A set that keeps the order in which its items came. A set of Python's goes by addresses, which no seed decides."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


class Ordered(set[T]):
    def __init__(self, items: Iterable[T] = ()) -> None:
        self._order = dict.fromkeys(items)
        super().__init__(self._order)

    def __iter__(self) -> Iterator[T]:
        return iter([item for item in self._order if item in self])

    def add(self, item: T) -> None:
        self._order[item] = None
        super().add(item)

    def pop(self) -> T:
        for item in self:
            self.discard(item)
            return item
        raise KeyError("pop from an empty set")
