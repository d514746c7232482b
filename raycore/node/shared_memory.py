"""Memory that processes of one node share: a file without a name, which others open through its maker's /proc."""

from __future__ import annotations

import mmap
import os


def create(name: str, num_bytes: int) -> tuple[mmap.mmap, int]:
    """New memory, all zeros, and its file descriptor, which stays open for others to find. Linux only.

    `name` is for those who look at a process's descriptors; it need not be unique.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    return mmap.mmap(fd, num_bytes), fd


def path_of(pid: int, fd: int) -> str:
    """Where other processes of the node find a process's memory."""
    return f"/proc/{pid}/fd/{fd}"


def open_at(path: str, num_bytes: int) -> mmap.mmap | None:
    """Another process's memory, or None if this process can't see it: another node, another container, another user.

    On another node `path` may be something else of that size: what lies in the memory has to tell.
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
