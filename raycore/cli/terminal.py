"""Lets a program go on although what reads its output is gone: a terminal that has closed, or a server's log."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable
from typing import Any


class _Output(io.FileIO):
    """An output stream. What can't be written for some reasons is discarded."""

    def __init__(self, descriptor: int, is_lost: Callable[[OSError], bool]) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._is_lost = is_lost

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if not self._is_lost(error):
                raise
            return len(data)


def open_missing_streams() -> None:
    """Open those of stdin, stdout and stderr that were closed before the program started, on the null device.

    Otherwise the next files and sockets get their descriptors, and what some library prints is written into them.
    """
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)  # the lowest free descriptor, so usually this one
            setattr(sys, name, open(descriptor, mode, closefd=False))  # noqa: SIM115 - it lives as long as the process


def outlive_terminal() -> None:
    """Make stdout and stderr discard output to a terminal that has closed, instead of raising OSError."""
    _replace_streams(lambda stream: stream.isatty(), lambda error: error.errno == errno.EIO)


def outlive_log() -> None:
    """Make stdout and stderr discard what can't be written, for any reason: a reader that has left, a full disk."""
    _replace_streams(lambda stream: True, lambda error: True)


def _replace_streams(is_meant: Callable[[Any], bool], is_lost: Callable[[OSError], bool]) -> None:
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is not None and is_meant(stream):
            buffer = io.BufferedWriter(_Output(stream.fileno(), is_lost))
            wrapped = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, wrapped)
