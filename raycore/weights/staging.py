"""Brings tensors from files to a device, through a few buffers in pinned memory.

A GPU copies from pinned memory by itself, while the host fills the next buffer. From the pages of a mapped file, the
driver would copy in small pieces, and the host would wait for each of them.
"""

from __future__ import annotations

# parts of torch are partially typed:
# pyright: reportUnknownMemberType=false
import threading
from collections.abc import Callable

import torch
from torch import Tensor

Store = Callable[[slice, Tensor], None]
"""Called with some rows of a tensor, as a slice and as a tensor in host memory. May copy from that asynchronously."""

NUM_READERS = 8
"""Threads that fill buffers. One thread copies from the page cache at a fraction of what a GPU's bus transfers."""
_BUFFER_BYTES = 8 << 20
_BUFFERS_PER_THREAD = 2


class Staging:
    """Copies tensors to a device. Any number of threads may use it, each with two buffers and a stream of its own."""

    def __init__(self, device: torch.device, buffer_bytes: int = _BUFFER_BYTES) -> None:
        """`buffer_bytes`: size of a buffer. A longer row gets a larger buffer."""
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._of_thread = threading.local()
        self.finish()  # the device may still use memory that has been freed, and that new tensors get

    def send(self, source: Tensor, store: Store) -> None:
        """Call `store` with all rows of `source`, a buffer's worth at a time.

        On a GPU, `store` runs with the thread's stream as the current stream. What it starts there may read the buffer
        after it has returned.
        """
        if not source.numel():
            return
        row_bytes = source[0].numel() * source.itemsize
        num_rows = max(1, self._buffer_bytes // row_bytes)
        lane = self._lane()
        for start in range(0, len(source), num_rows):
            rows = slice(start, min(start + num_rows, len(source)))
            lane.send(source[rows], rows, store)

    def finish(self) -> None:
        """Wait until everything sent is on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._of_thread, "lane", None)
        if lane is None:
            lane = self._of_thread.lane = _Lane(self._device, self._buffer_bytes)
        return lane


class _Lane:
    """One thread's buffers and stream."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buffers = [_Buffer(buffer_bytes, self._stream) for _ in range(_BUFFERS_PER_THREAD)]

    def send(self, source: Tensor, rows: slice, store: Store) -> None:
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        part = buffer.stage(source)
        # a stream that is None changes nothing
        with torch.cuda.stream(self._stream):
            store(rows, part)
        buffer.release()


class _Buffer:
    """Host memory that is used again once the device has read it. It is pinned if there is a stream."""

    def __init__(self, num_bytes: int, stream: torch.cuda.Stream | None) -> None:
        self._stream = stream
        self._is_read = None if stream is None else torch.cuda.Event()
        self._memory = self._allocate(num_bytes)

    def stage(self, source: Tensor) -> Tensor:
        """Return a copy of `source` in this memory, once the device has read what was there."""
        if self._is_read is not None:
            self._is_read.synchronize()
        num_bytes = source.numel() * source.itemsize
        if num_bytes > len(self._memory):
            self._memory = self._allocate(num_bytes)
        return self._memory[:num_bytes].view(source.dtype).view(source.shape).copy_(source)

    def release(self) -> None:
        """Let `stage` overwrite the memory after all work that is in the stream now."""
        if self._is_read is not None:
            self._is_read.record(self._stream)

    def _allocate(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
