"""Kills what is left in a session after its leader has ended. A program of its own: `python session_reaper.py PID`.

The kernel ends a local Ray's node daemon, which leads a session, together with the program that has started it. The
daemon's own children, agents and workers, find that out by themselves and take up to a minute. This process watches the
daemon and is in nobody's way: it imports nothing but a little of the standard library, and starts in 20 ms.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

_POLL_INTERVAL_S = 0.2
"""Where the kernel has no descriptors of processes (Linux before 5.3)."""

_RETRY_S = 0.01
_TIMEOUT_S = 10.0


def main(leader: int) -> None:
    """Wait for the end of process `leader`; then kill the processes of its session until there are none."""
    _wait_for_end(leader)
    deadline_s = time.monotonic() + _TIMEOUT_S
    while (members := _members(leader)) and time.monotonic() < deadline_s:
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_RETRY_S)


def _wait_for_end(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):
        while _session_of(pid) is not None:
            time.sleep(_POLL_INTERVAL_S)
    else:
        select.select([descriptor], [], [])


def _members(session: int) -> list[int]:
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _session_of(pid) == session]


def _session_of(pid: int) -> int | None:
    """None if the process has ended; one that its parent has yet to reap has."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, _, _, session, *_ = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(session)


if __name__ == "__main__":
    main(int(sys.argv[1]))
