"""What a worker needs of its machine: memory that there is, cores it may use, an allocator that keeps what it has."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of glibc's mallopt (malloc.h)."""


def keep_freed_memory() -> None:
    """Have glibc serve large temporaries from the heap, and keep the heap when they are freed.

    By default it maps and unmaps each of them, and the page faults cost more than the arithmetic on them. Does
    nothing where the C library isn't glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.debug("the C library has no mallopt; large temporaries may be slow")
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory_bytes() -> int:
    """Memory that can still be taken without swapping: of the machine, or of the control group if that has less."""
    candidates = [_machine_available(), cgroup_available()]
    return min((size for size in candidates if size is not None), default=1 << 30)


def _machine_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in fields else None


def cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the control group leaves of its limit; None where there is no limit or no group."""
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            texts = [(root / name).read_text().strip() for name in (limit, usage)]
        except OSError:
            continue
        if texts[0].isdigit():
            return max(0, int(texts[0]) - int(texts[1]))
    return None
