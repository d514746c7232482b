"""Blocks in the host's memory of one worker: numbered slots, each of which holds the bytes of a block."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from raycore.errors import InvalidConfig


class HostPool:
    """`blocks`, uint8[num_slots, block_bytes]. The kernel allocates a page of it when it is first written."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        """
        Raises:
            InvalidConfig: there isn't so much memory.
        """
        num_bytes = num_slots * block_bytes
        self._memory: mmap.mmap | None = None
        self.blocks: NDArray[np.uint8] = np.zeros((0, block_bytes), np.uint8)
        if num_bytes:
            try:
                self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            except (OSError, OverflowError, ValueError) as error:
                raise InvalidConfig(
                    f"kv_connector_extra_config: can't allocate {num_bytes} bytes of host memory for blocks ({error}): "
                    "lower cpu_bytes_to_use"
                ) from error
            self.blocks = np.ndarray((num_slots, block_bytes), np.uint8, self._memory)
