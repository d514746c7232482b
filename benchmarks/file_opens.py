"""Counts how often files are opened, by any process of this machine, with Linux's inotify."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_IN_OPEN = 0x20
_EVENT = struct.Struct("iIII")
"""Watch descriptor, mask, cookie, length of the name that follows."""


class FileOpens:
    """The opens of some files since the last count. The kernel merges an open with the same one right before it."""

    def __init__(self, paths: Iterable[Path]) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for path in paths:
            if self._fd < 0 or libc.inotify_add_watch(self._fd, os.fsencode(path), _IN_OPEN) < 0:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))

    def count(self) -> int:
        """Number of opens since the last call."""
        num_opens = 0
        while data := self._read():
            offset = 0
            while offset < len(data):
                *_, length = _EVENT.unpack_from(data, offset)
                offset += _EVENT.size + length
                num_opens += 1
        return num_opens

    def close(self) -> None:
        """Stop counting."""
        os.close(self._fd)

    def _read(self) -> bytes:
        try:
            return os.read(self._fd, 1 << 16)
        except BlockingIOError:
            return b""
