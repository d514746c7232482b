"""CPU time: how long this process's threads waited for a core, and how many cores other processes use.

Linux only. Elsewhere, and where the kernel hides these numbers, nothing is known.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_IDLE_FIELDS = (3, 4)
"""Of a line of /proc/stat: time without work, and time that only waits for a disk."""
_LEAST_WAIT_NS = 300_000
"""A thread that wakes up waits this long at most, if a core is free. A thread that is interrupted waits for
milliseconds."""


class ThreadWaits:
    """Adds up how long the threads of this process were ready to run but had no core.

    Threads whose waits are so short on average that they only woke up aren't counted.
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        """`tasks`: the directory with the threads' files."""
        self._tasks = tasks
        self._last: dict[str, tuple[int, int]] = {}
        """By thread id: how long, in nanoseconds, and how often it has waited."""
        self.new_s()

    def new_s(self) -> float:
        """Return how many seconds all threads together have waited since the last call."""
        now: dict[str, tuple[int, int]] = {}
        try:
            thread_ids = os.listdir(self._tasks)
        except OSError:
            return 0.0
        for thread_id in thread_ids:
            try:
                with open(f"{self._tasks}/{thread_id}/schedstat", "rb", buffering=0) as file:
                    _, waited_ns, num_waits = file.read(64).split()
                    now[thread_id] = int(waited_ns), int(num_waits)
            except (OSError, ValueError):  # the thread has ended, or the kernel doesn't count
                continue
        total_ns = 0
        for thread_id, (waited_ns, num_waits) in now.items():
            last_ns, last_num = self._last.get(thread_id, (0, 0))
            if waited_ns - last_ns >= _LEAST_WAIT_NS * (num_waits - last_num):
                total_ns += waited_ns - last_ns
        self._last = now
        return total_ns / 1e9


class OtherProcesses:
    """Measures how many of this process's cores other processes keep busy."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        """`stat`: the file with the time that each core was busy."""
        self._stat = stat
        self._last = self._read()

    def cores_used(self) -> float | None:
        """Return the number of cores that others have used on average since the last call. None if it isn't known."""
        now, last = self._read(), self._last
        self._last = now
        if now is None or last is None or now[0] <= last[0]:
            return None
        elapsed_s, busy_s, own_s = (new - old for new, old in zip(now, last, strict=True))
        return max(0.0, (busy_s - own_s) / elapsed_s)

    def _read(self) -> tuple[float, float, float] | None:
        """Return seconds: a clock, for how long this process's cores were busy, and for how long with this process."""
        try:
            lines = self._stat.read_text().splitlines()
            names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        except (OSError, AttributeError):
            return None
        busy = 0
        for line in lines:
            name, *fields = line.split()
            if name in names:
                ticks = [int(field) for field in fields[:8]]  # later ones are counted in earlier ones, too
                busy += sum(ticks) - sum(ticks[index] for index in _IDLE_FIELDS)
        return time.monotonic(), busy / _TICKS_PER_S, time.process_time()
