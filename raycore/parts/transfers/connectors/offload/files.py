"""Blocks in files: one for each block of a worker, named by its digest, in a directory that several workers share.

A file is written under another name and then renamed, so that a reader sees all of it or nothing. It says which block
it is and has a checksum, so that a damaged one is a miss. Many processes may write and remove files at the same time.
The directory is bounded: whoever has written a part of what is left looks how large it is, and removes the files that
were used the longest ago.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidConfig
from raycore.recurring import Recurring
from raycore.system import os, time

logger = logging.getLogger(__name__)

_SUFFIX, _TEMPORARY = ".kv", ".tmp"
_HEADER = struct.Struct("<8s16sQI4x")
"""What it is, the digest, the number of bytes that follow, and their checksum."""
_MAGIC = b"raycorkv"
_KEPT = 0.8
"""To so much of its limit the directory shrinks, once less than a tenth is left."""
_SHARES = 8
"""After so much of what is left, a worker looks again. Up to 8 workers together don't write more than is left, or a
block each."""
_STALE_S = 60.0
"""A temporary file that is so old belongs to a process that has died."""
_PAUSE_S = 30.0
"""For how long nothing is written after the disk was full or failed."""


class BlockFiles:
    """The files of one worker's blocks. `read` and `exists` may be called on other threads than `write`."""

    def __init__(self, root: Path, name: str, block_bytes: int, max_bytes: int) -> None:
        """
        Args:
            root: the directory that workers share.
            name: the directory in it for this worker's blocks. Workers have the same one only if their blocks are the
                same bytes.
            max_bytes: of all files below `root`.
        """
        self.root = root
        self.directory = root / name
        self._block_bytes = block_bytes
        self._max_bytes = max_bytes
        self._allowance = -1
        """So many bytes may be written before the next look at the size of all files. Negative: it is due."""
        self._numbers = itertools.count()
        self._paused_until_s = 0.0
        self._failed_writes, self._failed_reads = Recurring(), Recurring()

    def check(self) -> None:
        """Make the directory, and write to it.

        Raises:
            InvalidConfig: that fails.
        """
        probe = self.directory / f"{os.getpid()}-probe{_TEMPORARY}"
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise InvalidConfig(
                f"kv_connector_extra_config: path={str(self.root)!r} can't be written: {error}"
            ) from error

    def path(self, digest: bytes) -> Path:
        """Where the block with a digest is, if it is."""
        return path_of(self.directory, digest)

    def write(self, digest: bytes, data: NDArray[np.uint8]) -> bool:
        """Write a block. Returns whether that was done: not if the disk is full or fails, which is logged."""
        path, size = self.path(digest), _HEADER.size + len(data)
        if time.monotonic() < self._paused_until_s:
            return False
        temporary = path.with_name(f"{os.getpid()}-{next(self._numbers)}{_TEMPORARY}")
        try:
            if not self._has_room(size):
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            header = _HEADER.pack(_MAGIC, digest, len(data), zlib.crc32(data.data))
            with temporary.open("wb", buffering=0) as file:
                if file.write(header) != len(header) or file.write(data.data) != len(data):
                    raise OSError("the disk took only a part of the file")
            temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._paused_until_s = time.monotonic() + _PAUSE_S
            if self._failed_writes.is_due(error.errno):
                text = "blocks of the KV cache, such as %s, can't be written, so they are only computed: %s"
                logger.warning(text, path, error)
            return False
        self._allowance -= size
        return True

    def read(self, digest: bytes, pages: Sequence[memoryview]) -> bool:
        """Read a block into `pages`, which are `block_bytes` together.

        Returns: whether it is there and right. If not, the pages' content means nothing. A damaged file is removed.
        """
        path = self.path(digest)
        header = bytearray(_HEADER.size)
        parts, num_read = [memoryview(header), *pages], 0
        try:
            with path.open("rb", buffering=0) as file:
                for first in range(0, len(parts), _MAX_PARTS):
                    num_read += os.readv(file.fileno(), parts[first : first + _MAX_PARTS])
                is_whole = num_read == _HEADER.size + self._block_bytes and not file.read(1)
                with contextlib.suppress(OSError):  # others may only read
                    os.utime(file.fileno())  # it was used now
        except FileNotFoundError:
            return False
        except OSError as error:
            if self._failed_reads.is_due(error.errno):
                text = "blocks of the KV cache, such as %s, can't be read, so they are computed: %s"
                logger.warning(text, path, error)
            return False
        checksum = 0
        for page in pages:
            checksum = zlib.crc32(page, checksum)
        if is_whole and _HEADER.unpack(header) == (_MAGIC, digest, self._block_bytes, checksum):
            return True
        if self._failed_reads.is_due("damaged"):
            logger.warning("files of blocks are damaged, such as %s, so the blocks are computed", path)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def clear(self) -> None:
        """Remove all blocks of this worker."""
        doomed = self.directory.with_name(f"{self.directory.name}-{os.getpid()}-{next(self._numbers)}{_TEMPORARY}")
        with contextlib.suppress(OSError):
            self.directory.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def _has_room(self, size: int) -> bool:
        """Whether a file of `size` bytes may be written. Makes room if there is too little."""
        if self._allowance >= size:
            return True
        total = self._shrink()
        self._allowance = max((self._max_bytes - total) // _SHARES, size if total + size <= self._max_bytes else -1)
        return self._allowance >= size

    def _shrink(self) -> int:
        """Remove files until there is room, the last used ones last. Returns how many bytes all files have."""
        files = sorted(_files_below(self.root))
        total = sum(size for _, size, _ in files)
        if total <= self._max_bytes * 0.9:
            return total
        for _, size, path in files:
            if total <= self._max_bytes * _KEPT:
                break
            with contextlib.suppress(OSError):  # another worker removes it, too
                os.unlink(path)
            total -= size
        return total


_MAX_PARTS = 512
"""Maximum number of buffers of a system call, below what all systems allow."""


def path_of(directory: Path, digest: bytes) -> Path:
    """The file of a block: in one of 256 directories, so that none has too many files."""
    name = digest.hex()
    return directory / name[:2] / (name + _SUFFIX)


def _files_below(root: Path) -> Iterator[tuple[float, int, str]]:
    """Yield (time of last use, bytes, path) of all blocks' files. Removes temporary ones of processes that died."""
    for parent, _, names in os.walk(root):
        for name in names:
            path = os.path.join(parent, name)
            try:
                status = os.stat(path)
            except OSError:
                continue  # it has just been removed
            if name.endswith(_SUFFIX):
                yield status.st_mtime, status.st_size, path
            elif name.endswith(_TEMPORARY) and time.time() - status.st_mtime > _STALE_S:
                with contextlib.suppress(OSError):
                    os.unlink(path)
