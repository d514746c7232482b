"""When the phases of this process's start began, and how long they took. For the spans of starts.

What a worker does at its start says so by `phase`, whether or not traces are sent: that costs microseconds, once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from raycore.messages import StartPhase
from raycore.system import os, time

_latest: deque[StartPhase] = deque(maxlen=16)
"""The phases of this process's worker. A worker that wakes up has some of them again."""


@contextmanager
def phase(name: str, noted: list[StartPhase] | None = None) -> Generator[None, None, None]:
    """Note what runs in the context, or a function that this decorates, as a phase of a start.

    `noted`: the phases so far. None: those of this process's worker.
    """
    begun_s, since_s = time.time(), time.monotonic()
    yield
    (_latest if noted is None else noted).append(StartPhase(name, begun_s, time.monotonic() - since_s))


def note_process() -> None:
    """Note that a worker's process has begun just now."""
    _latest.extend(process_start())


def phases_so_far(_: object = None) -> list[StartPhase]:
    """The phases of this process's worker, in the order in which they ended. `collective_rpc` passes the worker."""
    return list(_latest)


def process_start() -> list[StartPhase]:
    """What this process has done until now, as a phase. Empty on systems that don't tell when it began."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return []
    return [StartPhase("process start", time.time() - age_s, age_s)]
