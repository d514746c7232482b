"""What a worker lets others read: which of its blocks have the keys and values of which prefixes.

The threads that serve other workers read blocks while the worker computes, and the worker must not wait for them. So
each block has a version. It changes before a step may overwrite the block, and a copy counts only if the version is
the same after it as before.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from raycore.system import threading


class BlockStore(Protocol):
    """The KV cache's tensors, as bytes. Any thread may call the methods, for different blocks at the same time."""

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of this worker, over all layers."""
        ...

    @property
    def layout(self) -> str:
        """What the bytes mean. Workers with equal layouts can read each other's blocks."""
        ...

    def read(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block to `out`, uint8[block_bytes]. On return, the copy is complete."""
        ...

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        """Copy `data`, uint8[block_bytes], to a block. On return, steps see it."""
        ...


class Held(NamedTuple):
    """A block that has the keys and values of a prefix's last block."""

    block: int
    version: int


class HeldBlocks:
    """The blocks that others may read, by the digests of their prefixes. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[bytes, Held] = {}
        self._version = 0
        """Counts up, so that no two entries ever have the same version."""

    def __len__(self) -> int:
        return len(self._held)

    def add(self, digests: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Let others read blocks, whose content is complete. A digest that has a block keeps it."""
        with self._lock:
            for digest, block in zip(digests, blocks, strict=True):
                self._version += 1
                self._held.setdefault(digest, Held(block, self._version))

    def remove(self, digests: Iterable[bytes]) -> None:
        """Let others read these blocks no more. Call this before a step may overwrite them. Ignores unknown ones."""
        with self._lock:
            for digest in digests:
                self._held.pop(digest, None)

    def clear(self) -> None:
        """Let others read nothing."""
        with self._lock:
            self._held.clear()

    def find(self, digest: bytes) -> Held | None:
        """The block with this digest. None: there is none."""
        with self._lock:
            return self._held.get(digest)

    def is_unchanged(self, digest: bytes, held: Held) -> bool:
        """Whether `find` has returned `held` for a block that could be read all the time since."""
        with self._lock:
            return self._held.get(digest) == held


def checksum(digest: bytes, data: NDArray[np.uint8]) -> int:
    """A checksum of a block's bytes, and of which block they should be.

    It finds what accidents do: bytes that are missing, late, another block's, or changed on the way.
    """
    return zlib.crc32(data.data, zlib.crc32(digest))
