"""The machine's resources for a worker: available memory, usable cores, and how the C library allocates memory."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from raycore.system import gc, os

logger = logging.getLogger(__name__)

_NEVER_TRIM = (1 << 31) - 1

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""`_M_TRIM_THRESHOLD` and `_M_MMAP_THRESHOLD` are parameters of glibc's mallopt (malloc.h)."""


def keep_freed_memory() -> None:
    """Make glibc allocate large buffers from the heap, and keep the heap's memory when the buffers are freed.

    By default, glibc maps new memory for each large buffer and unmaps it afterwards. For temporary tensors, the page
    faults then take more time than the arithmetic. Does nothing if the C library is not glibc.
    """
    libc = _glibc()
    if libc is None:
        logger.debug("the C library has no mallopt: allocating large temporary tensors may be slow")
        return
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


@contextmanager
def freed_memory_returned() -> Generator[None, None, None]:
    """Return the memory that is freed in the `with` block to the operating system, in spite of `keep_freed_memory()`.

    Frees unreachable objects, too, also those that `freeze_heap()` has excluded from collections. Does only that if the
    C library is not glibc.
    """
    libc = _glibc()
    if libc is not None:
        libc.mallopt(_M_TRIM_THRESHOLD, 0)  # else the heaps of threads other than the main thread keep their ends
    try:
        yield
        gc.unfreeze()
        gc.collect()
        if libc is not None:
            libc.malloc_trim(0)
    finally:
        if libc is not None:
            libc.mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM)


def _glibc() -> ctypes.CDLL | None:
    """The C library if it is glibc; otherwise None."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None


def usable_cores() -> int:
    """Number of CPU cores that this process may keep busy.

    These are the cores on which it may run, or fewer if its control group (cgroup) has a quota of CPU time: a pod that
    is limited to 4 CPUs sees all cores of its node. A quota that isn't a whole number of cores is rounded down.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cgroup_cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def cgroup_cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> float | None:
    """The smallest CPU quota of this process's control group (cgroup) and the groups above it, in cores.

    None if there is no quota or no control group.

    Args:
        root: the directory with the control groups' files.
        membership: the file that names this process's groups.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2: one hierarchy for all controllers
            hierarchy, read = root, _quota
        elif "cpu" in controllers.split(","):
            hierarchy, read = root / "cpu", _quota_version_1
        else:
            continue
        own = hierarchy / group.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(hierarchy):
                quotas += read(folder)
    return min(quotas, default=None)


def _quota(folder: Path) -> list[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except OSError:
        return []
    return [int(quota) / int(period)] if quota.isdigit() else []


def _quota_version_1(folder: Path) -> list[float]:
    try:
        quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
    except OSError:
        return []
    return [quota / period] if quota > 0 else []


def available_memory_bytes() -> int:
    """Bytes that can be allocated without swapping on this machine and within this process's control group (cgroup).

    Returns 1 GiB if neither limit is known.
    """
    limit = cgroup_memory()
    candidates = [_machine_memory("MemAvailable"), None if limit is None else limit.left]
    return min((size for size in candidates if size is not None), default=1 << 30)


def total_memory_bytes() -> int | None:
    """Bytes that this machine has, or this process's control group (cgroup) allows. None if neither is known."""
    limit = cgroup_memory()
    candidates = [_machine_memory("MemTotal"), None if limit is None else limit.limit]
    return min((size for size in candidates if size is not None), default=None)


def _machine_memory(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(fields[field].split()[0]) * 1024 if field in fields else None


class MemoryLimit(NamedTuple):
    """A control group's limit, and what is left of it, in bytes."""

    limit: int
    left: int


def cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> MemoryLimit | None:
    """The control group's (cgroup's) memory limit. None if there is no limit or no control group.

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
            return MemoryLimit(int(texts[0]), max(0, int(texts[0]) - int(texts[1])))
    return None
