"""A worker's KV cache as bytes: reads and writes whole blocks, whatever the tensors in them mean.

A block has a *page* for each layer of the group that it belongs to: see `raycore.cache_layout`. In other places than
the cache, a block's pages follow each other, layer by layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class KVCaches:
    """The pages of all blocks of one worker. Shapes: N blocks, P bytes of a page.

    Any thread may call `read` and `write`, for different blocks at the same time.
    """

    def __init__(
        self, layers: Sequence[Tensor], num_blocks: int, layout: str, groups: Sequence[Sequence[int]] = ()
    ) -> None:
        """
        Args:
            layers: by layer of the largest group on the stage, the memory of its N blocks, one after the other.
            layout: what the bytes mean. Workers with equal layouts can use each other's blocks.
            groups: see the attribute. Empty: there is one.
        """
        self.groups = groups or [range(len(layers))]
        """By group: its layers on the stage, in the order of their pages, counted among those with a cache."""
        self.num_blocks = num_blocks
        self.layout = layout
        self.pages = [layer.view(torch.uint8).view(num_blocks, -1) for layer in layers]
        """By layer of a group: uint8[N, P], views of the cache."""
        self.page_bytes = [page.shape[1] for page in self.pages]
        """By layer: P."""
        self.block_bytes = sum(self.page_bytes)
        """Bytes of a block, over all layers."""
        self._device = self.pages[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._arrays = [] if self._stream is not None else [page.numpy() for page in self.pages]

    def read(self, block: int, out: NDArray[np.uint8]) -> None:
        """Copy a block to `out`, uint8[block_bytes]. On return, the copy is complete."""
        self.read_blocks([block], out[None])

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        """Copy `data`, uint8[block_bytes], to a block. On return, steps see it."""
        self.write_blocks([block], data[None])

    def read_blocks(self, blocks: Sequence[int], out: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]) -> None:
        """Copy blocks to the arrays of `out`, each uint8[block_bytes].

        On a GPU, the content is that after all steps that have been launched. On return, the copies are complete.
        """
        if self._stream is not None:
            self._read_from_gpu(self._stream, blocks, out)
            return
        # many small copies of contiguous bytes are twice as fast as numpy's indexing with arrays
        for block, target in zip(blocks, out, strict=True):
            start = 0
            for page, size in zip(self._arrays, self.page_bytes, strict=True):
                target[start : start + size] = page[block]
                start += size

    def write_blocks(self, blocks: Sequence[int], data: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]) -> None:
        """Copy the arrays of `data`, each uint8[block_bytes], to blocks. On return, steps see them."""
        if self._stream is not None:
            self._write_to_gpu(self._stream, blocks, data)
            return
        for block, source in zip(blocks, data, strict=True):
            start = 0
            for page, size in zip(self._arrays, self.page_bytes, strict=True):
                page[block] = source[start : start + size]
                start += size

    def page_views(self, block: int) -> list[memoryview]:
        """Return the pages of a block as writable memory, for reading files into them. Only on a CPU."""
        return [page[block].data for page in self._arrays]

    @property
    def is_on_cpu(self) -> bool:
        """Whether the cache is in the host's memory."""
        return self._stream is None

    def _read_from_gpu(
        self, stream: torch.cuda.Stream, blocks: Sequence[int], out: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
    ) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(self._device))
            index = torch.tensor(blocks, device=self._device)
            gathered = torch.cat([page.index_select(0, index) for page in self.pages], 1)
            host = torch.empty(gathered.shape, dtype=torch.uint8, pin_memory=True)
            host.copy_(gathered, non_blocking=True)
        stream.synchronize()
        for target, source in zip(out, host.numpy(), strict=True):
            target[:] = source

    def _write_to_gpu(
        self, stream: torch.cuda.Stream, blocks: Sequence[int], data: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
    ) -> None:
        host = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, pin_memory=True)
        for target, source in zip(host.numpy(), data, strict=True):
            target[:] = source
        with torch.inference_mode(), torch.cuda.stream(stream):
            # steps that were launched may still read what the blocks had
            stream.wait_stream(torch.cuda.default_stream(self._device))
            index, arrived = torch.tensor(blocks, device=self._device), host.to(self._device, non_blocking=True)
            start = 0
            for page, size in zip(self.pages, self.page_bytes, strict=True):
                page.index_copy_(0, index, arrived[:, start : start + size])
                start += size
        stream.synchronize()
