"""Checks that a local Ray can write where it has to, before it starts.

Ray itself would wait for half a minute for a process that couldn't write, and then report the wait.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import errno
import sys
import tempfile
from pathlib import Path

from raycore.errors import InitializationError
from raycore.node.disk import room_of
from raycore.system import os

_SESSION_BYTES = 256 << 10
"""About what a session's sockets, ports and first log lines take."""

_LONGEST_PATH = 107 - len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""The most characters of the directory in which sockets have a path that Linux takes."""

_SHARED_MEMORY = Path("/dev/shm")


def check_room() -> None:
    """Raises InitializationError if Ray's directory for temporary files is full or has too long a path, or if it or
    shared memory can't be written to."""
    from ray._private.utils import get_ray_address_file  # pyright: ignore[reportPrivateImportUsage]

    folder = Path(get_ray_address_file(None)).parent
    if len(str(folder)) > _LONGEST_PATH:
        raise InitializationError(
            f"a local Ray can't start: the path of its directory, {folder}, is too long for sockets. Set RAY_TMPDIR to "
            f"one of at most {_LONGEST_PATH - len('/ray')} characters"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(_SESSION_BYTES))
            os.posix_fallocate(file.fileno(), 0, _SESSION_BYTES)  # raises an error after a write that was cut short
    except OSError as error:
        room = room_of(folder) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise InitializationError(
            f"a local Ray can't start: it can't write its sockets and logs to {folder} ({error.strerror}{room}). Set "
            "RAY_TMPDIR to a short path of a directory that has room, or in a container mount an emptyDir at /tmp"
        ) from error
    # a full one is used for little: Ray then has its object store in the directory above
    if sys.platform == "linux" and not os.access(_SHARED_MEMORY, os.W_OK):
        raise InitializationError(
            f"a local Ray can't start: {_SHARED_MEMORY}, in which its processes share memory, is missing or can't be "
            "written to. In a container, mount a tmpfs there (Kubernetes: an emptyDir with `medium: Memory`)"
        )
