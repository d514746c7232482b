"""Counts how often files are opened, by any process of this machine, with Linux's inotify.

The kernel merges an open with another one right before it that hasn't been read yet. So a thread reads them at once. If
processes open a file at the same moment, the count can still be too small, but never 0.
"""

from __future__ import annotations

import ctypes
import os
import select
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path

_IN_OPEN = 0x20
_POLL_S = 0.05
_EVENT = struct.Struct("iIII")
"""Watch descriptor, mask, cookie, length of the name that follows."""


class FileOpens:
    """The opens of some files."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._num_opens = 0
        self._is_closed = False
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for path in paths:
            if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_OPEN) < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
        self._reader = threading.Thread(target=self._read, name="file-opens", daemon=True)
        self._reader.start()

    def count(self) -> int:
        """Number of opens so far."""
        time.sleep(2 * _POLL_S)  # the thread may not have read the last ones yet
        return self._num_opens

    def close(self) -> None:
        """Stop counting."""
        self._is_closed = True
        self._reader.join()
        os.close(self._fd)

    def _read(self) -> None:
        while not self._is_closed:
            if not select.select([self._fd], [], [], _POLL_S)[0]:
                continue
            data, offset = os.read(self._fd, 1 << 16), 0
            while offset < len(data):
                *_, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size + length
                self._num_opens += 1
