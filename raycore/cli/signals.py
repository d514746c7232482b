"""SIGTERM and SIGHUP, where a program has no more to do about them than to end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from raycore.node.signals import ending_signals, forget_signals, is_echo


class Terminated(KeyboardInterrupt):
    """A signal came while nothing could be finished first."""


_came: int | None = None
"""The signal for which `Terminated` was raised."""


def interrupted_by() -> int:
    """The signal behind a KeyboardInterrupt. Its type does not tell: where a program waits for Ray, Ray replaces it."""
    return signal.SIGINT if _came is None else _came


@contextmanager
def raising_on_signals() -> Generator[None, None, None]:
    """While the block runs, SIGTERM and SIGHUP do what Ctrl-C does: what was started is stopped on the way out.

    Does nothing outside of the main thread, which alone gets signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _came
    _came = None
    forget_signals()
    numbers = set(ending_signals()) - {signal.SIGINT}
    before = {number: signal.signal(number, _raise) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    if not is_echo(number):
        _came = number
        raise Terminated
