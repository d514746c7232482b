"""Stands in for `queue`."""

from __future__ import annotations

import heapq
import queue as real
from collections import deque
from collections.abc import Callable
from typing import Any

from simulation.world.kernel import Thread, pause
from simulation.world.threads import Condition, Lock, wait_among, wake_any, world

Empty = real.Empty
Full = real.Full

on_put: Callable[[SimpleQueue | Queue, int], object] | None = None
"""Called with each queue that has got an item, and its number of items."""


class SimpleQueue:
    """A queue without bound. `put` never waits."""

    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiting: list[Thread] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        if on_put is not None:
            on_put(self, len(self._items))
        wake_any(self._waiting)
        pause()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        pause()
        if timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        until_s = None if timeout is None else world().now_s + timeout
        while block and not self._items and (until_s is None or world().now_s < until_s):
            wait_among(self._waiting, "an item of a queue", until_s)
        if not self._items:
            raise Empty
        return self._items.popleft()

    def put_nowait(self, item: Any) -> None:
        self.put(item)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def qsize(self) -> int:
        pause()
        return len(self._items)

    def empty(self) -> bool:
        pause()
        return not self._items


class Queue:
    def __init__(self, maxsize: int = 0) -> None:
        self.maxsize = maxsize
        self.mutex = Lock()
        self.not_empty = Condition(self.mutex)
        self.not_full = Condition(self.mutex)
        self.all_tasks_done = Condition(self.mutex)
        self.unfinished_tasks = 0
        self.queue: Any = self._make()

    def _make(self) -> Any:
        return deque()

    def _put(self, item: Any) -> None:
        self.queue.append(item)

    def _get(self) -> Any:
        return self.queue.popleft()

    def _is_full(self) -> bool:
        return 0 < self.maxsize <= len(self.queue)

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self.not_full:
            if self._is_full() and (not block or not self.not_full.wait_for(lambda: not self._is_full(), timeout)):
                raise Full
            self._put(item)
            if on_put is not None:
                on_put(self, len(self.queue))
            self.unfinished_tasks += 1
            self.not_empty.notify()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        with self.not_empty:
            if not self.queue and (not block or not self.not_empty.wait_for(lambda: self.queue, timeout)):
                raise Empty
            item = self._get()
            self.not_full.notify()
            return item

    def put_nowait(self, item: Any) -> None:
        self.put(item, block=False)

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def task_done(self) -> None:
        with self.all_tasks_done:
            if self.unfinished_tasks <= 0:
                raise ValueError("task_done() called too many times")
            self.unfinished_tasks -= 1
            if not self.unfinished_tasks:
                self.all_tasks_done.notify_all()

    def join(self) -> None:
        with self.all_tasks_done:
            self.all_tasks_done.wait_for(lambda: not self.unfinished_tasks)

    def qsize(self) -> int:
        with self.mutex:
            return len(self.queue)

    def empty(self) -> bool:
        return not self.qsize()

    def full(self) -> bool:
        with self.mutex:
            return self._is_full()


class PriorityQueue(Queue):
    def _make(self) -> Any:
        return []

    def _put(self, item: Any) -> None:
        heapq.heappush(self.queue, item)

    def _get(self) -> Any:
        return heapq.heappop(self.queue)


class LifoQueue(Queue):
    def _make(self) -> Any:
        return []

    def _get(self) -> Any:
        return self.queue.pop()
