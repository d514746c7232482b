"""A clock whose time passes only while all threads wait, so that hours of waiting take a moment."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from raycore.cluster.clock import Clock

_LAST_S = 1e4
"""The end of time: what goes on until then never ends."""


class FakeClock(Clock):
    """Runs its threads one at a time, in an order that is the same in each run.

    A thread runs until it waits. Then a thread continues whose wait is over; if there is none, the time becomes that at
    which the next wait ends. The thread that made the clock, the test's, is one of them.
    """

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        """What was raised in threads, and not caught."""
        self._now_s = 0.0
        self._waiting: list[_Wait] = []

    def now_s(self) -> float:
        return self._now_s

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        return self.wait_until(event.is_set, timeout_s)

    def wait_until(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait until `is_over` returns True. Returns False if `timeout_s` seconds have passed."""
        if is_over():
            return True
        wait = self.enter(is_over, timeout_s)
        self.let_others_run()
        wait.turn.acquire()
        assert is_over() or self._now_s >= wait.until_s, "all threads wait for something that never happens"
        assert self._now_s < _LAST_S, "something is waited for again and again"
        return is_over()

    def let_pass(self, seconds: float) -> None:
        """Wait that long."""
        self.wait_until(lambda: False, seconds)
        if self.failures:
            raise self.failures[0]

    def start_thread(self, name: str, run: Callable[[], object]) -> threading.Thread:
        thread = _FakeThread(self, name, run)
        thread.start()
        return thread

    def enter(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> _Wait:
        """Note that a thread is going to wait."""
        self._waiting.append(_Wait(is_over, math.inf if timeout_s is None else self._now_s + timeout_s))
        return self._waiting[-1]

    def let_others_run(self) -> None:
        """Let the thread continue whose turn it is."""
        over = next((wait for wait in self._waiting if wait.is_over()), None)
        if over is None:
            over = min(self._waiting, key=lambda wait: wait.until_s)
            if over.until_s < math.inf:
                self._now_s = max(self._now_s, over.until_s)
        self._waiting.remove(over)
        over.turn.release()


class _Wait:
    def __init__(self, is_over: Callable[[], bool], until_s: float) -> None:
        self.is_over = is_over
        self.until_s = until_s
        self.turn = threading.Lock()
        """Held until the thread may continue. An event would cost twice as much, and hours have many waits."""
        self.turn.acquire()


class _FakeThread(threading.Thread):
    def __init__(self, clock: FakeClock, name: str, work: Callable[[], object]) -> None:
        super().__init__(name=name, daemon=True)
        self._clock = clock
        self._work = work
        self._has_ended = False
        self._begin = clock.enter(lambda: True)

    def run(self) -> None:
        self._begin.turn.acquire()
        try:
            self._work()
        except BaseException as error:
            self._clock.failures.append(error)
        self._has_ended = True
        self._clock.let_others_run()

    def join(self, timeout: float | None = None) -> None:
        self._clock.wait_until(lambda: self._has_ended, timeout)
