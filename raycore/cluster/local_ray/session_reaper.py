"""Kills the processes left in a session after its leader has ended. Run as `python session_reaper.py PID`.

A local Ray's node daemon leads a session. When the program that started Ray ends, the kernel kills the daemon. The
daemon's children (agents and workers) take up to a minute to notice. This script watches the daemon, and kills the
children when the daemon has ended. It imports only a little of the standard library, so it starts in 20 ms.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from contextlib import suppress

_POLL_INTERVAL_S = 0.2
"""Interval, in seconds, between checks whether the leader runs, if the kernel has no pidfds (Linux before 5.3)."""

_RETRY_S = 0.01
_TIMEOUT_S = 10.0


def main(leader: int) -> None:
    """Wait for process `leader` to end. Then kill the processes of its session until none is left, for at most 10 s."""
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
    """The session id of a process; None if the process has ended. Zombies count as ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, _, _, session, *_ = file.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return None if state in "ZX" else int(session)


if __name__ == "__main__":
    main(int(sys.argv[1]))
