"""All-reduce and all-gather among ranks: workers that compute the same layers together.

`SharedMemoryCollectives` is for CPU ranks on one node. Every rank copies its part into shared memory, waits for the
others, and sums all parts in rank order, so that all ranks get the same bits. It has no thread, so it costs nothing
while idle. `TorchCollectives` is for everything else. `make_collectives()` chooses between the two. How the ranks find
each other is in `rendezvous`.
"""

# parts of torch are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import datetime
import mmap
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import Store as TorchStore  # pyright: ignore[reportPrivateImportUsage]

from raycore.parallel.peer_memory import HEADER_BYTES, LINE, Store, share_memory, wait_until
from raycore.parallel.room import Room

CAPACITY_BYTES = 4 << 20
"""Bytes of the buffer for one rank's part. Larger tensors are exchanged in pieces."""


class Collectives(Protocol):
    """Collective operations. Every rank must make the same calls in the same order, with tensors of the same shapes."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace `x` with the sum of all ranks' `x`, and return it."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, in rank order."""
        ...

    def gather_columns(self, x_RC: Tensor, columns: slice) -> Tensor:
        """Return these columns of every rank's `x_RC`, in rank order, [ranks, R, columns]. Each rank may ask for other
        columns."""
        ...

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        ...


def make_collectives(
    room: Room, rank: int, size: int, device: torch.device, timeout_s: float, *, batch_invariant: bool = False
) -> Collectives:
    """Connect to the other ranks of a group, which share `room`.

    Args:
        batch_invariant: sum in rank order, so that the result for an element doesn't depend on its index.

    Raises:
        PeerFailed: another worker has failed, or is gone.
        TimeoutError: not all ranks joined within `timeout_s`.
        torch.distributed.DistError: so, in torch.
    """
    if device.type == "cpu":
        shared = SharedMemoryCollectives.join(room, rank, size, timeout_s, room.check)
        if shared is not None:
            return shared
    store, timeout = room.torch_store(rank, size), datetime.timedelta(seconds=timeout_s)
    return TorchCollectives(store, rank, size, device, timeout, batch_invariant, room.check)


class TorchCollectives:
    """Collectives of torch.distributed: NCCL on GPUs, Gloo elsewhere.

    The object has a process group of its own instead of torch's default one, because a process may be in several
    groups.
    """

    def __init__(
        self,
        store: TorchStore,
        rank: int,
        size: int,
        device: torch.device,
        timeout: datetime.timedelta,
        batch_invariant: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """`check`: raises if another rank is gone. It knows more of that than torch."""
        self._size = size
        self._check = check
        self._batch_invariant = batch_invariant
        self._store = store
        if device.type == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = torch.distributed.ProcessGroupNCCL(self._store, rank, size, options)
        else:
            self._group = torch.distributed.ProcessGroupGloo(self._store, rank, size, timeout)

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace `x` with the sum of all ranks' `x`, and return it."""
        if not self._batch_invariant:
            self._wait(self._group.allreduce([x]))
            return x
        parts = self.all_gather(x)
        return x.copy_(sum(parts[1:], start=parts[0].float()))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, in rank order."""
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._wait(self._group.allgather([parts], [x.contiguous()]))
        return parts

    def gather_columns(self, x_RC: Tensor, columns: slice) -> Tensor:
        """Return these columns of every rank's `x_RC`, in rank order, [ranks, R, columns]."""
        return torch.stack([part_RC[:, columns] for part_RC in self.all_gather(x_RC)])

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        if self._group is not None:
            self._group.shutdown()
        self._group = self._store = None

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError:
            self._check()
            raise


class SharedMemoryCollectives:
    """Collectives over shared memory, which has a page of counters and two buffers.

    Each rank has a counter: how many exchanges it has entered. Exchanges alternate between the two buffers. No rank
    enters an exchange before all ranks have entered the previous one, so no rank overwrites what another still has to
    read.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout_s: float, check: Callable[[], object]) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        self._check = check
        counters = np.frombuffer(memory, np.int64, count=size * LINE)
        self._entered = counters[::LINE]
        self._buffers = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES).view(2, size, CAPACITY_BYTES)
        self._num_exchanges = 0

    @classmethod
    def join(
        cls, store: Store, rank: int, size: int, timeout_s: float, check: Callable[[], object] = lambda: None
    ) -> SharedMemoryCollectives | None:
        """Share memory with the other ranks. Returns None on all ranks if they can't.

        `check`: raises if another rank is gone, so that an exchange doesn't wait for it.
        """
        memory = share_memory(store, rank, size, HEADER_BYTES + 2 * size * CAPACITY_BYTES)
        return None if memory is None else cls(memory, rank, size, timeout_s, check)

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace `x` with the sum of all ranks' `x`, and return it."""
        flat = x.view(-1)
        for piece in flat.split(CAPACITY_BYTES // x.element_size()):
            parts = self._exchange(piece)
            if x.dtype == torch.float32:
                torch.sum(parts, 0, out=piece)
            else:
                piece.copy_(parts.sum(0, dtype=torch.float32))
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, in rank order."""
        flat = x.reshape(-1)
        pieces = [self._exchange(piece).clone() for piece in flat.split(CAPACITY_BYTES // x.element_size())]
        return [part.view(x.shape) for part in torch.cat(pieces, dim=1)]

    def gather_columns(self, x_RC: Tensor, columns: slice) -> Tensor:
        """Return these columns of every rank's `x_RC`, in rank order, [ranks, R, columns]."""
        x_RC = x_RC.contiguous()
        num_rows, width = x_RC.shape
        gathered = x_RC.new_empty(len(self._entered), num_rows, len(range(width)[columns]))
        size = CAPACITY_BYTES // (width * x_RC.element_size())
        assert size, f"a row of {width} numbers doesn't fit into the buffer"
        for first in range(0, num_rows, size):
            piece_RC = x_RC[first : first + size]
            parts_PRC = self._exchange(piece_RC.view(-1)).view(-1, *piece_RC.shape)
            gathered[:, first : first + size] = parts_PRC[:, :, columns]
        return gathered

    def close(self) -> None:
        """Do nothing: there is no connection to close."""

    def _exchange(self, piece: Tensor) -> Tensor:
        """Give `piece` to the other ranks. Returns all ranks' pieces, [size, len(piece)].

        The result is in a buffer. It is valid until this rank's next exchange.
        """
        self._num_exchanges += 1
        parts = self._buffers[self._num_exchanges % 2].view(piece.dtype)[:, : len(piece)]
        parts[self._rank].copy_(piece)
        self._entered[self._rank] = self._num_exchanges
        self._wait()
        return parts

    def _wait(self) -> None:
        """Wait until every rank has entered the current exchange."""
        if not wait_until(lambda: self._entered.min() >= self._num_exchanges, self._timeout_s, self._check):
            late = np.flatnonzero(self._entered < self._num_exchanges).tolist()
            raise TimeoutError(
                f"ranks {late} of a group of {len(self._entered)} didn't take part in an exchange within "
                f"{self._timeout_s:g} s: they are stuck or gone"
            )
