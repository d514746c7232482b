"""The machine's resources for a worker: available memory, usable cores, and how the C library allocates memory."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""`_M_TRIM_THRESHOLD` and `_M_MMAP_THRESHOLD` are parameters of glibc's mallopt (malloc.h)."""


def keep_freed_memory() -> None:
    """Make glibc allocate large buffers from the heap, and keep the heap's memory when the buffers are freed.

    By default, glibc maps new memory for each large buffer and unmaps it afterwards. For temporary tensors, the page
    faults then take more time than the arithmetic. Does nothing if the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.debug("the C library has no mallopt: allocating large temporary tensors may be slow")
        return
    mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1)


def usable_cores() -> int:
    """Number of CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory_bytes() -> int:
    """Bytes that can be allocated without swapping on this machine and within this process's control group (cgroup).

    Returns 1 GiB if neither limit is known.
    """
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
    """Bytes left below the control group's (cgroup's) memory limit. None if there is no limit or no control group.

    `root`: the directory with the control group's files.
    """
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
