"""The signals that ask a program to end.

When a second signal arrives, a program ends at once. But one request to end can arrive as two signals: the command
`timeout` and service managers signal a process and then its process group, and when a terminal is closed, both the
kernel and the shell send SIGHUP. Such a duplicate, called an *echo*, must not count as a second signal.
"""

from __future__ import annotations

from raycore.system import signal, time

_ECHO_S = 0.5
"""Signals that arrive within this many seconds of the first signal are echoes."""

_RAY_ALARM_S = 3.0
"""Seconds after SIGTERM at which the alarm of Ray's handler ends the process."""

_first_s: float | None = None
"""Time of the first signal (`time.monotonic()`). None before the first signal."""


def ending_signals() -> list[int]:
    """SIGTERM, SIGINT and, unless this process ignores it, SIGHUP.

    The command `nohup` makes a program ignore SIGHUP, so that the program outlives its terminal.
    """
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGTERM, signal.SIGINT, *hang_up]


def forget_signals() -> None:
    """Make the next signal count as the first one."""
    global _first_s
    _first_s = None


def is_echo(number: int) -> bool:
    """Whether signal `number`, which has just arrived, is an echo. A SIGHUP that isn't the first signal always is."""
    global _first_s
    now_s = time.monotonic()
    if _first_s is None:
        _first_s = now_s
        return False
    return number == signal.SIGHUP or now_s - _first_s < _ECHO_S


def cancel_ray_alarm() -> None:
    """Cancel the alarm with which Ray ends this process with SIGABRT, so that an engine has time to end.

    In a program that doesn't handle SIGTERM itself, Ray's C++ handler sets this alarm when SIGTERM arrives, before
    Python's handler raises SystemExit. Other alarms are kept: those that Python code handles, and later ones.
    """
    remaining_s, _ = signal.getitimer(signal.ITIMER_REAL)
    if 0.0 < remaining_s <= _RAY_ALARM_S and signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, None):
        signal.setitimer(signal.ITIMER_REAL, 0.0)
