"""For how long a rank has made no progress, by which the supervisor finds stalled ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

from raycore.system import time


class LoopProgress:
    """What the loop of a rank is doing, and since when. Only the loop enters `step()` and `long_work()`."""

    def __init__(self, workers_answer: Callable[[], bool]) -> None:
        """`workers_answer`: whether all workers' processes answer. Called from the thread that asks for the age."""
        self._workers_answer = workers_answer
        self._started_s: float | None = None
        self._is_long = False
        self._answered_s = 0.0
        """When all workers have last answered."""

    def step(self) -> LoopProgress:
        """Enter the result for work that has to end in time."""
        return self

    def __enter__(self) -> None:
        self._started_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._started_s = None

    @contextmanager
    def long_work(self) -> Generator[None, None, None]:
        """Work of the workers that may take long, such as loading weights. They have to answer meanwhile."""
        self._is_long = True
        try:
            with self.step():
                yield
        finally:
            self._is_long = False

    def age_s(self) -> float:
        """Seconds since the step began or, in long work, since all workers answered; 0 at rest. Any thread may ask."""
        started_s = self._started_s
        if started_s is None:
            return 0.0
        if self._is_long and self._workers_answer():
            self._answered_s = time.monotonic()
        return time.monotonic() - max(started_s, self._answered_s)
