"""Lets a program go on writing to a terminal that has closed, while the program still finishes requests."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any


class _Terminal(io.FileIO):
    """A terminal. Output that is written after the terminal has closed is discarded."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outlive_terminal() -> None:
    """Make stdout and stderr discard output to a terminal that has closed, instead of raising OSError."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is not None and stream.isatty():
            buffer = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            wrapped = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, wrapped)
