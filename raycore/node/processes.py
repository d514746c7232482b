"""Checks processes of this machine, sends signals to them, and waits for their end."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from raycore.system import os, signal, time

_POLL_INTERVAL_S = 0.005
_PR_SET_PDEATHSIG = 1


def is_running(pid: int) -> bool:
    """Whether process `pid` exists and has not ended. False for a zombie, which its parent has not reaped yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        # the process is gone, or this system has no /proc; without /proc, zombies count as running
        return not Path("/proc/self/stat").exists() and _exists(pid)
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, even if this process hangs or is stopped. Linux only.

    To the kernel, the parent is the thread that has started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def send_signal(pids: Iterable[int], number: int) -> None:
    """Send signal `number` to each of the processes that has not ended."""
    for pid in pids:
        if is_running(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def wait_until_gone(pids: Iterable[int], timeout_s: float) -> list[int]:
    """Wait until the processes have ended, at most `timeout_s` seconds. Returns the pids of those that still run."""
    deadline_s = time.monotonic() + timeout_s
    while (running := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline_s:
        time.sleep(_POLL_INTERVAL_S)
    return running


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
