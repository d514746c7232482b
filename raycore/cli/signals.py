"""SIGTERM, where a program has no more to do about it than to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM came while nothing could be finished first."""


@contextmanager
def raising_on_sigterm() -> Generator[None, None, None]:
    """While the block runs, SIGTERM does what Ctrl-C does: what was started is stopped on the way out.

    Does nothing outside of the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise(number: int, frame: FrameType | None) -> None:
    raise Terminated
