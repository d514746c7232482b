"""Streams of outputs without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_END = object()


class FakeStream:
    """Takes the place of `raycore.ray_api.Stream`: gives the items of the method's iterator, each of which may wait."""

    def __init__(self, method: Any, *args: Any) -> None:
        self._items = iter(method.options(num_returns="streaming").remote(*args))

    def next_or_tell(self, told: Callable[[Future[Any]], object]) -> None:
        def wait() -> None:
            item: Future[Any] = Future()
            item.set_result(next(self._items, _END))
            told(item)

        threading.Thread(target=wait, daemon=True).start()

    def take(self, told: Future[Any]) -> Any:
        if told.result() is _END:
            raise StopIteration
        return told.result()


class SilentStream:
    """A stream of a rank that says nothing."""

    def __init__(self, method: Any, *args: Any) -> None:
        pass

    def next_or_tell(self, told: Callable[[Future[Any]], object]) -> None:
        pass
