"""Looks at something every few seconds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Periodic:
    """A thread that calls `action` every `interval_s`, from `start()` to `stop()`."""

    def __init__(self, name: str, interval_s: float, action: Callable[[], object]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """For the first time one interval from now."""
        self._thread.start()

    def stop(self) -> None:
        """The present call, if there is one, is the last. Idempotent."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._action()
            except Exception:  # the next look may do better, and nobody else would say that there are none any more
                logger.exception("%s failed", self._thread.name)
