"""The signals that ask a program to end.

A second signal means that the program must end at once. But one request can arrive twice: `timeout` and service
managers signal a process and then its process group, and the SIGHUP of a closed terminal comes both from the kernel and
from the shell. Such a duplicate, an echo, must not count as a second signal.
"""

from __future__ import annotations

import signal
import time

_ECHO_S = 0.5
"""Signals within this time of the first one are its echoes."""

_first_s: float | None = None
"""When the first signal came."""


def ending_signals() -> list[int]:
    """SIGTERM, SIGINT and, unless it is ignored, SIGHUP. `nohup` ignores it so that a program outlives its terminal."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


def forget_signals() -> None:
    """Make the next signal count as the first one."""
    global _first_s
    _first_s = None


def is_echo(number: int) -> bool:
    """Whether a signal that has just come is an echo. A SIGHUP after any other signal always is."""
    global _first_s
    now_s = time.monotonic()
    if _first_s is None:
        _first_s = now_s
        return False
    return number == signal.SIGHUP or now_s - _first_s < _ECHO_S
