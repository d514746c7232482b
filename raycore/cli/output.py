"""Writes what a command prints or saves, and says in one line if there is no room for it."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path

from raycore.errors import RaycoreError
from raycore.node.disk import room_of

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def save(path: Path, text: str) -> None:
    """Write a file. Creates its folder. Raises RaycoreError if that fails."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RaycoreError(unwritten(error, path)) from error


def is_full(error: OSError) -> bool:
    """Whether an error means that there is no room for what was to be written."""
    return error.errno in _NO_ROOM


def unwritten(error: OSError, path: str | os.PathLike[str] = "") -> str:
    """The message for what can't be written. `path`: the file. Empty: the one that the error names, or else stdout."""
    path = path or error.filename
    room = room_of(path) if path and is_full(error) else ""
    return f"{path or 'the output'} can't be written: {error.strerror}{room}"


def discard_output() -> None:
    """Discard what is still to be written to stdout. At its exit, Python would try again, and print the error."""
    with suppress(OSError, ValueError):  # it has no descriptor, or is closed
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
