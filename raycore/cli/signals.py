"""Makes SIGTERM and SIGHUP end a command as Ctrl-C does, while the command has no requests to finish.

A signal can arrive twice: see `raycore.node.signals`. The duplicate is called an echo.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from raycore.node.signals import ending_signals, forget_signals, is_echo


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP arrived while the command had no requests to finish."""


_came: int | None = None
"""The signal for which `Terminated` was raised; None if it wasn't raised."""


def interrupted_by() -> int:
    """The number of the signal that caused a KeyboardInterrupt.

    The exception's type doesn't tell, because Ray may replace a `Terminated` by a plain KeyboardInterrupt.
    """
    return signal.SIGINT if _came is None else _came


@contextmanager
def raising_on_signals(*, exits_then: bool) -> Generator[None, None, None]:
    """While the block runs, SIGTERM and SIGHUP raise `Terminated`, so that cleanup runs as it does after Ctrl-C.

    Does nothing outside the main thread, because only that thread can handle signals.

    Args:
        exits_then: whether the process exits after the block. If a signal has ended the block, echoes of that signal
            are then ignored until the process ends.
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
        was_ended = exits_then and interrupted_by() != signal.SIGINT
        for number, handler in before.items():
            # an echo must not change the exit status
            signal.signal(number, _end_unless_echo if was_ended else handler)


def _raise(number: int, frame: FrameType | None) -> None:
    global _came
    if not is_echo(number):
        _came = number
        raise Terminated


def _end_unless_echo(number: int, frame: FrameType | None) -> None:
    if not is_echo(number):
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
