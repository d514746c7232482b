"""Memory that processes on one node share.

It is an anonymous file, which other processes open as /proc/<pid>/fd/<fd> of the process that created it.
"""

from __future__ import annotations

import mmap

from raycore.system import os


def create(name: str, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Create zeroed memory, and return it with its file descriptor. Linux only.

    The descriptor must stay open until other processes have opened the memory. `name` appears in the link
    /proc/<pid>/fd/<fd> and need not be unique.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return mmap.mmap(fd, num_bytes), fd


def path_of(pid: int, fd: int) -> str:
    """The path at which other processes on the node can open the memory with the descriptor `fd` of process `pid`."""
    return f"/proc/{pid}/fd/{fd}"


def open_at(path: str, num_bytes: int) -> mmap.mmap | None:
    """Open another process's memory at `path`. Returns None if this process can't open it.

    For example, the other process may be on another node, in another container, or belong to another user. On another
    node, `path` may also be a different file of the same size, so callers must check the contents.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return mmap.mmap(fd, num_bytes) if os.fstat(fd).st_size == num_bytes else None
    except (OSError, ValueError):
        return None
    finally:
        os.close(fd)
