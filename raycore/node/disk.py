"""What file systems have left, for messages."""

from __future__ import annotations

from pathlib import Path

from raycore.system import os


def free_bytes(path: str | os.PathLike[str]) -> int | None:
    """Bytes that this user can still write to the file system of `path`, which may not exist yet. None: not known."""
    usage = _usage(path)
    return None if usage is None else usage.f_bavail * usage.f_frsize


def room_of(path: str | os.PathLike[str]) -> str:
    """`: 0 MiB of 64 MiB are free`, of the file system of `path`. Empty if not known."""
    usage = _usage(path)
    if usage is None:
        return ""
    free, size = (blocks * usage.f_frsize / (1 << 20) for blocks in (usage.f_bavail, usage.f_blocks))
    return f": {free:.1f} MiB of {size:.0f} MiB are free"


def _usage(path: str | os.PathLike[str]) -> os.statvfs_result | None:
    for folder in (Path(path), *Path(path).parents):
        try:
            return os.statvfs(folder)
        except OSError:  # it doesn't exist, or may not be entered
            continue
    return None
