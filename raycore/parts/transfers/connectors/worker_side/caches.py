"""A worker's KV cache as bytes: reads and writes whole blocks, whatever the tensors in them mean.

A block has a *page* for each layer of the group that it belongs to: see `raycore.cache_layout`. In other places than
the cache, a block's pages follow each other, layer by layer.

Parts of states are blocks, too, whose ids come after those of the cache: first the parts of the first row, then those
of the second one, and so on. They may be shorter. What follows them in other places means nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.parts.transfers.connectors.worker_side.state_parts import NO_STATES, StateParts


class KVCaches:
    """The pages of all blocks of one worker. Shapes: N blocks, P bytes of a page.

    Any thread may call `read` and `write`, for different blocks at the same time.
    """

    def __init__(
        self,
        layers: Sequence[Tensor],
        num_blocks: int,
        layout: str,
        groups: Sequence[Sequence[int]] = (),
        states: StateParts = NO_STATES,
        beside: Mapping[int, int] | None = None,
    ) -> None:
        """
        Args:
            layers: by layer of the largest group on the stage, the memory of its N blocks, one after the other; then
                the memory of what layers keep beside.
            layout: what the bytes mean. Workers with equal layouts can use each other's blocks.
            groups: see the attribute. Empty: there is one.
            beside: see the attribute. None: no layer keeps anything beside.
        """
        self.groups = groups or [range(len(layers))]
        """By group: its layers on the stage, in the order of their pages, counted among those with a cache."""
        self.beside = beside or {}
        """By layer, counted in the same way: which of `pages` has what it keeps of the same tokens beside, such as an
        indexer's keys. Most layers keep nothing."""
        self.num_blocks = num_blocks
        self.layout = layout
        self.pages = [layer.view(torch.uint8).view(num_blocks, -1) for layer in layers]
        """By layer of a group, and then those of `beside`: uint8[N, P], views of the cache."""
        self.page_bytes = [page.shape[1] for page in self.pages]
        """By page: P."""
        self.block_bytes = sum(self.page_bytes)
        """Bytes of a block, over all pages."""
        self._device = self.pages[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._arrays = [] if self._stream is not None else [page.numpy() for page in self.pages]
        self._states = states
        self._state_arrays = [[page.numpy() for page in part] for part in states.pages] if self.is_on_cpu else []

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
            for page in self._pages_of(block):
                end = start + len(page)
                target[start:end] = page
                start = end

    def write_blocks(self, blocks: Sequence[int], data: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]) -> None:
        """Copy the arrays of `data`, each uint8[block_bytes], to blocks. On return, steps see them."""
        if self._stream is not None:
            self._write_to_gpu(self._stream, blocks, data)
            return
        for block, source in zip(blocks, data, strict=True):
            start = 0
            for page in self._pages_of(block):
                end = start + len(page)
                page[:] = source[start:end]
                start = end

    def page_views(self, block: int) -> list[memoryview]:
        """Return the pages of a block as writable memory, for reading files into them. Only on a CPU.

        They have `block_bytes` together: after those of a part of a state comes memory that nobody reads.
        """
        pages = self._pages_of(block)
        rest = self.block_bytes - sum(map(len, pages))
        return [page.data for page in pages] + ([np.empty(rest, np.uint8).data] if rest else [])

    def _pages_of(self, block: int) -> list[NDArray[np.uint8]]:
        """Return the pages of a block or of a part of a state, on a CPU."""
        if block < self.num_blocks:
            return [page[block] for page in self._arrays]
        row, part = self._states.place_of(block - self.num_blocks)
        return [page[row] for page in self._state_arrays[part]]

    @property
    def is_on_cpu(self) -> bool:
        """Whether the cache is in the host's memory."""
        return self._stream is None

    def _read_from_gpu(
        self, stream: torch.cuda.Stream, blocks: Sequence[int], out: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]
    ) -> None:
        with torch.inference_mode(), torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(self._device))
            gathered = torch.empty((len(blocks), self.block_bytes), dtype=torch.uint8, device=self._device)
            for pages, places, rows in self._runs(blocks):
                found = torch.cat([page.index_select(0, rows) for page in pages], 1)
                gathered[:, : found.shape[1]].index_copy_(0, places, found)
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
            arrived = host.to(self._device, non_blocking=True)
            for pages, places, rows in self._runs(blocks):
                start = 0
                for page in pages:
                    end = start + page.shape[1]
                    page.index_copy_(0, rows, arrived[:, start:end].index_select(0, places))
                    start = end
        stream.synchronize()

    def _runs(self, blocks: Sequence[int]) -> Iterator[tuple[Sequence[Tensor], Tensor, Tensor]]:
        """Yield the blocks of the cache, and the states' parts of each number: their pages, which of `blocks` they are,
        and their rows in these pages. On a GPU."""
        by_part: dict[int, list[tuple[int, int]]] = {}
        for place, block in enumerate(blocks):
            row, part = (block, -1) if block < self.num_blocks else self._states.place_of(block - self.num_blocks)
            by_part.setdefault(part, []).append((place, row))
        for part, found in by_part.items():
            pages = self.pages if part < 0 else self._states.pages[part]
            if pages:
                places, rows = torch.tensor(found, device=self._device).unbind(1)
                yield pages, places, rows
