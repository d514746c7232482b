"""Memory shared by processes of one node: an anonymous file that others open as /proc/<pid>/fd/<fd> of its creator."""

from __future__ import annotations

import mmap
import os


def create(name: str, num_bytes: int) -> tuple[mmap.mmap, int]:
    """Create zeroed memory. Returns it with its file descriptor, which must stay open until others have opened it.

    Linux only. `name` appears in the link /proc/<pid>/fd/<fd> and need not be unique.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return mmap.mmap(fd, num_bytes), fd


def path_of(pid: int, fd: int) -> str:
    """The path under which other processes of the node can open the memory."""
    return f"/proc/{pid}/fd/{fd}"


def open_at(path: str, num_bytes: int) -> mmap.mmap | None:
    """Open another process's memory. None if this process cannot: another node, another container, another user.

    On another node `path` may be a different file of the same size, so callers must check the contents.
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
