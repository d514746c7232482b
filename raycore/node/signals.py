"""The signals that ask a program to end.

Some arrive twice although they were meant once: `timeout` and service managers signal a process and then its process
group, and a terminal that hangs up reaches a program directly and through the shell. Such an echo must not pass for the
impatience of a second signal.
"""

from __future__ import annotations

import signal
import time

_ECHO_S = 0.5
"""Signals that follow the first one sooner than this are its echoes."""

_first_s: float | None = None
"""When the first signal came."""


def ending_signals() -> list[int]:
    """SIGTERM, SIGINT and SIGHUP. SIGHUP only if it is not ignored: `nohup` has a program outlive its terminal."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


def forget_signals() -> None:
    """The next signal is the first one."""
    global _first_s
    _first_s = None


def is_echo(number: int) -> bool:
    """Whether a signal, which has just come, is the echo of an earlier one. A terminal hangs up only once."""
    global _first_s
    now_s = time.monotonic()
    if _first_s is None:
        _first_s = now_s
        return False
    return number == signal.SIGHUP or now_s - _first_s < _ECHO_S
