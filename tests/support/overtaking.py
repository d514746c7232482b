"""Another call that comes just before a lock is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Overtaken:
    def __init__(self, owner: Any, name: str, act: Callable[[], object]) -> None:
        self._owner, self._name, self._act = owner, name, act
        self._lock = getattr(owner, name)

    def __enter__(self) -> Any:
        setattr(self._owner, self._name, self._lock)
        self._act()
        return self._lock.__enter__()

    def __exit__(self, *exc: object) -> Any:
        return self._lock.__exit__(*exc)


def overtake(owner: Any, name: str, act: Callable[[], object]) -> None:
    """Have `act` called when the object's lock of this name is taken next, before it is."""
    setattr(owner, name, _Overtaken(owner, name, act))
