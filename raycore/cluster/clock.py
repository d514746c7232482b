"""Time, waiting and threads. Tests have a clock of their own, so that they don't wait."""

from __future__ import annotations

from collections.abc import Callable

from raycore.system import threading, time


class Clock:
    """The time of this machine, and its threads."""

    def now_s(self) -> float:
        """Seconds since some moment. Never goes back."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Wait until the event is set, at most `timeout_s` seconds (None: without limit). Returns whether it is set."""
        return event.wait(timeout_s)

    def start_thread(self, name: str, run: Callable[[], object]) -> threading.Thread:
        """Call `run` on a new thread, which doesn't keep the program from ending."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread
