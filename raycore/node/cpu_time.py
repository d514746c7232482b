"""CPU time: how long this process's threads waited for a core, and how many cores other processes use.

Linux only. Elsewhere, and where the kernel hides these numbers, nothing is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from pathlib import Path
from typing import NamedTuple

from raycore.system import os, time

_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_IDLE_FIELDS = (3, 4)
"""Of a line of /proc/stat: time without work, and time that only waits for a disk."""
_NICE_FIELD = 1
"""Of such a line: time of processes whose niceness is above 0."""
_LEAST_WAIT_NS = 300_000
"""A thread that wakes up waits this long at most, if a core is free. A thread that is interrupted waits for
milliseconds."""
_COMPUTES = 0.1
"""A thread computes if it runs at least this fraction of the time that the busiest thread runs."""
_LOOK_EVERY = 10
"""After so many readings of the threads that compute, all threads are read. An actor of Ray has a hundred of them."""


class _Times(NamedTuple):
    """What a thread has done since it began."""

    ran_ns: int
    waited_ns: int
    num_waits: int


class ThreadWaits:
    """Adds up how long the threads of this process that compute were ready to run but had no core.

    Threads that only do short work, like receiving a message, wait behind those that compute, for up to half a second.
    That says nothing about other processes, so it isn't counted, and neither are waits so short on average that the
    thread only woke up.
    """

    def __init__(self, tasks: Path = Path("/proc/self/task")) -> None:
        """`tasks`: the directory with the threads' files."""
        self._tasks = tasks
        self._idle: dict[str, _Times] = {}
        """By thread id: those that didn't compute when all threads were last looked at, and what they had done."""
        self._num_calls = 0
        self._last = self._read(self._thread_ids())
        """By thread id: the others."""

    def new_s(self) -> float:
        """Return how many seconds all threads together have waited since the last call."""
        now = self._read(each for each in self._thread_ids() if each not in self._idle)
        changes = {thread_id: _since(self._last.get(thread_id), times) for thread_id, times in now.items()}
        self._last = now
        least_ns = _COMPUTES * max((change.ran_ns for change in changes.values()), default=0)
        computing = {thread_id: change for thread_id, change in changes.items() if change.ran_ns >= least_ns}
        self._num_calls += 1
        if self._num_calls % _LOOK_EVERY == 0:
            self._look_at_all(computing.keys(), least_ns)
        waits_ns = [
            change.waited_ns for change in computing.values() if change.waited_ns >= _LEAST_WAIT_NS * change.num_waits
        ]
        return sum(waits_ns) / 1e9

    def read_all(self) -> None:
        """Read all threads for a while, because others compute from now on."""
        self._last |= self._read(self._idle)
        self._idle = {}
        self._num_calls = 0

    def _look_at_all(self, computing: Set[str], least_ns: float) -> None:
        """Find out which threads compute. `least_ns`: how long such a thread has run since the last call."""
        seen = self._read(self._idle)
        idle = {
            thread_id: times
            for thread_id, times in seen.items()
            if times.ran_ns - self._idle[thread_id].ran_ns < _LOOK_EVERY * least_ns
        }
        self._last |= {thread_id: times for thread_id, times in seen.items() if thread_id not in idle}
        self._idle = idle | {each: self._last.pop(each) for each in self._last.keys() - computing - seen.keys()}

    def _thread_ids(self) -> list[str]:
        try:
            return os.listdir(self._tasks)
        except OSError:
            return []

    def _read(self, thread_ids: Iterable[str]) -> dict[str, _Times]:
        times: dict[str, _Times] = {}
        for thread_id in thread_ids:
            try:
                with open(f"{self._tasks}/{thread_id}/schedstat", "rb", buffering=0) as file:
                    times[thread_id] = _Times(*map(int, file.read(64).split()))
            except (OSError, ValueError, TypeError):  # the thread has ended, or the kernel doesn't count
                continue
        return times


def _since(last: _Times | None, now: _Times) -> _Times:
    return now if last is None else _Times(*(new - old for new, old in zip(now, last, strict=True)))


class OtherProcesses:
    """Measures how many of this process's cores other processes keep busy.

    Processes of a higher niceness than this one's don't count, because they hardly slow it down.
    """

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        """`stat`: the file with the time that each core was busy."""
        self._stat = stat
        is_nice = hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) > 0
        self._free_fields = _IDLE_FIELDS if is_nice else (*_IDLE_FIELDS, _NICE_FIELD)
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
                busy += sum(ticks) - sum(ticks[index] for index in self._free_fields)
        return time.monotonic(), busy / _TICKS_PER_S, time.process_time()
