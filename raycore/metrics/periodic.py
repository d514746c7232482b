"""A thread that repeats an action."""

from __future__ import annotations

import logging
from collections.abc import Callable

from raycore.recurring import Recurring
from raycore.system import threading

logger = logging.getLogger(__name__)


class Periodic:
    """A thread that calls `action` every `interval_s` seconds, from `start()` to `stop()`."""

    def __init__(
        self, name: str, interval_s: float, action: Callable[[], object], failures: Recurring | None = None
    ) -> None:
        """`failures`: says which failures of `action` are logged. None: the usual ones."""
        self._interval_s = interval_s
        self._failures = failures or Recurring()
        self._action = action
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. The first call comes after one interval."""
        self._thread.start()

    def stop(self) -> None:
        """Stop after the current call, if there is one. Doesn't wait. Idempotent."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._action()
            except Exception as error:  # go on: the next call may succeed, and a dead thread would go unnoticed
                if self._failures.is_due(repr(error)):
                    logger.exception("%s failed", self._thread.name)
            else:
                self._failures.end()
