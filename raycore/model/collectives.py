"""All-reduce and all-gather among ranks: workers that compute a model together.

`SharedMemoryCollectives` is for CPU ranks on one node. Every rank copies its part into shared memory, waits for the
others, and sums all parts in rank order, so that all ranks get the same bits. It has no thread, so it costs nothing
while idle. `TorchCollectives` is for everything else. `join()` chooses between the two.
"""

# parts of torch are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import datetime
import mmap
import os
import sys
import time
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from raycore.node import shared_memory

CAPACITY_BYTES = 4 << 20
"""Bytes of the buffer for one rank's part. Larger tensors are exchanged in pieces."""

_LINE = 8
"""Number of 64-bit words in a cache line. Each rank's counter has a line of its own."""
_HEADER_BYTES = 4096
_TOKEN_BYTES = 16
_SPIN_S = 0.002
"""How long, in seconds, a rank that waits for other ranks spins. Then it sleeps for `_NAP_S` between checks.

Ranks that share cores usually arrive closer together than this.
"""
_NAP_S = 100e-6


class Collectives(Protocol):
    """Collective operations. Every rank must make the same calls in the same order, with tensors of the same shapes."""

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace `x` with the sum of all ranks' `x`, and return it."""
        ...

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, in rank order."""
        ...

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        ...


def join(
    address: str, rank: int, size: int, device: torch.device, timeout_s: float, *, batch_invariant: bool = False
) -> Collectives:
    """Connect to the other ranks at `address`, `tcp://host:port`, where rank 0 listens.

    Args:
        batch_invariant: sum in rank order, so that the result for an element doesn't depend on its index.

    Raises:
        torch.distributed.DistError: not all ranks joined within `timeout_s`.
    """
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    timeout = datetime.timedelta(seconds=timeout_s)
    store = TCPStore(host.strip("[]"), int(port), size, rank == 0, timeout)
    if device.type == "cpu":
        shared = SharedMemoryCollectives.join(store, rank, size, timeout_s)
        if shared is not None:
            _part(store, rank, size)
            return shared
    return TorchCollectives(store, rank, size, device, timeout, batch_invariant)


def _part(store: Store, rank: int, size: int) -> None:
    """Stop using the store. Rank 0, whose process holds the store, waits until all ranks no longer need it."""
    store.set(f"parts/{rank}", "")
    if rank == 0:
        store.wait([f"parts/{other}" for other in range(size)])


class TorchCollectives:
    """Collectives of torch.distributed: NCCL on GPUs, Gloo elsewhere.

    The object has a process group of its own instead of torch's default one, because a process may be in several
    groups.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout: datetime.timedelta,
        batch_invariant: bool = False,
    ) -> None:
        self._size = size
        self._batch_invariant = batch_invariant
        self._store = PrefixStore("collectives", store)  # keeps rank 0's store alive, which the other ranks use
        if device.type == "cuda":
            options = torch.distributed.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group: Any = torch.distributed.ProcessGroupNCCL(self._store, rank, size, options)
        else:
            self._group = torch.distributed.ProcessGroupGloo(self._store, rank, size, timeout)

    def all_reduce_(self, x: Tensor) -> Tensor:
        """Replace `x` with the sum of all ranks' `x`, and return it."""
        if not self._batch_invariant:
            self._group.allreduce([x]).wait()
            return x
        parts = self.all_gather(x)
        return x.copy_(sum(parts[1:], start=parts[0].float()))

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's `x`, in rank order."""
        parts = [torch.empty_like(x) for _ in range(self._size)]
        self._group.allgather([parts], [x.contiguous()]).wait()
        return parts

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent."""
        if self._group is not None:
            self._group.shutdown()
        self._group = self._store = None


class SharedMemoryCollectives:
    """Collectives over shared memory, which has a page of counters and two buffers.

    Each rank has a counter: how many exchanges it has entered. Exchanges alternate between the two buffers. No rank
    enters an exchange before all ranks have entered the previous one, so no rank overwrites what another still has to
    read.
    """

    def __init__(self, memory: mmap.mmap, rank: int, size: int, timeout_s: float) -> None:
        self._rank = rank
        self._timeout_s = timeout_s
        counters = np.frombuffer(memory, np.int64, count=size * _LINE)
        self._entered = counters[::_LINE]
        self._buffers = torch.frombuffer(memory, dtype=torch.uint8, offset=_HEADER_BYTES).view(2, size, CAPACITY_BYTES)
        self._num_exchanges = 0

    @classmethod
    def join(cls, store: Store, rank: int, size: int, timeout_s: float) -> SharedMemoryCollectives | None:
        """Map the memory that rank 0 creates. Returns None on all ranks unless all of them can map it."""
        num_bytes = _HEADER_BYTES + 2 * size * CAPACITY_BYTES
        memory, fd = _offer(store, num_bytes) if rank == 0 else (_open(store, num_bytes), -1)
        store.set(f"sees/{rank}", "yes" if memory is not None else "no")
        is_shared = all(store.get(f"sees/{other}") == b"yes" for other in range(size))
        if fd >= 0:
            os.close(fd)
        return cls(memory, rank, size, timeout_s) if memory is not None and is_shared else None

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
        started_s = time.monotonic()
        while self._entered.min() < self._num_exchanges:
            waited_s = time.monotonic() - started_s
            if waited_s < _SPIN_S:
                os.sched_yield()  # lets a late rank run if there are more ranks than cores
            elif waited_s < self._timeout_s:
                time.sleep(_NAP_S)
            else:
                late = np.flatnonzero(self._entered < self._num_exchanges).tolist()
                raise TimeoutError(
                    f"ranks {late} of a group of {len(self._entered)} didn't take part in an exchange within "
                    f"{self._timeout_s:g} s: they are stuck or gone"
                )


def _offer(store: Store, num_bytes: int) -> tuple[mmap.mmap | None, int]:
    """On rank 0, create the memory, and offer it to the other ranks, which open its file descriptor through /proc."""
    if sys.platform != "linux":
        store.set("memory", "none")
        return None, -1
    memory, fd = shared_memory.create("raycore-collectives", num_bytes)
    token = os.urandom(_TOKEN_BYTES)
    memory[_HEADER_BYTES - _TOKEN_BYTES : _HEADER_BYTES] = token
    store.set("memory", f"{shared_memory.path_of(os.getpid(), fd)} {token.hex()}")
    return memory, fd


def _open(store: Store, num_bytes: int) -> mmap.mmap | None:
    """On the other ranks, open the memory that rank 0 offers. Returns None if this rank can't.

    A token distinguishes rank 0's memory from a file that has the same path on another node.
    """
    path, _, token = store.get("memory").decode().partition(" ")
    memory = shared_memory.open_at(path, num_bytes)
    is_right = memory is not None and memory[_HEADER_BYTES - _TOKEN_BYTES : _HEADER_BYTES] == bytes.fromhex(token)
    return memory if is_right else None
