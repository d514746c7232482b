"""Output to a terminal that may hang up while the program still has requests to finish."""

from __future__ import annotations

import errno
import io
import sys
from typing import Any


class _Terminal(io.FileIO):
    """A terminal. What is written to it once it is gone is lost."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outlive_terminal() -> None:
    """Have what is printed to a terminal that has hung up be lost, instead of raising OSError."""
    for name in ("stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is not None and stream.isatty():
            buffer = io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False))
            wrapped = io.TextIOWrapper(buffer, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, wrapped)
