"""Memory that a group of workers on one node share, and how they wait for each other's writes to it."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol

from raycore.node import shared_memory

HEADER_BYTES = 4096
"""Bytes at the beginning for the group's counters. The last of them are a token."""
LINE = 8
"""Number of 64-bit words in a cache line. Each counter has a line of its own."""

_TOKEN_BYTES = 16
_SPIN_S = 0.002
"""How long, in seconds, a worker that waits for others spins. Then it sleeps for `_NAP_S` between checks.

Workers that share cores usually arrive closer together than this.
"""
_NAP_S = 100e-6


class Store(Protocol):
    """What a group's workers share: a `Room`, or a store of torch's."""

    def set(self, key: str, value: str) -> object: ...
    def get(self, key: str) -> bytes: ...


def share_memory(store: Store, rank: int, size: int, num_bytes: int) -> mmap.mmap | None:
    """Map zeroed memory that rank 0 of `size` workers creates. The kernel allocates only pages that are written to.

    Returns None on all of them unless all can map it.
    """
    memory, fd = _offer(store, num_bytes) if rank == 0 else (_open(store, num_bytes), -1)
    store.set(f"sees/{rank}", "yes" if memory is not None else "no")
    is_shared = all(store.get(f"sees/{other}") == b"yes" for other in range(size))
    if fd >= 0:
        os.close(fd)
    return memory if is_shared else None


def wait_until(is_ready: Callable[[], bool], timeout_s: float, check: Callable[[], object]) -> bool:
    """Wait until `is_ready()`. Returns False if that takes longer than `timeout_s` seconds.

    `check`: raises if there is no use in waiting. Called when that has taken longer than usual.
    """
    started_s = time.monotonic()
    while not is_ready():
        waited_s = time.monotonic() - started_s
        if waited_s < _SPIN_S:
            os.sched_yield()  # lets a late worker run if there are more workers than cores
        elif waited_s < timeout_s:
            check()
            time.sleep(_NAP_S)
        else:
            return False
    return True


def _offer(store: Store, num_bytes: int) -> tuple[mmap.mmap | None, int]:
    """On rank 0, create the memory, and offer it to the other ranks, which open its file descriptor through /proc."""
    if sys.platform != "linux":
        store.set("memory", "none")
        return None, -1
    memory, fd = shared_memory.create("raycore-workers", num_bytes)
    token = os.urandom(_TOKEN_BYTES)
    memory[HEADER_BYTES - _TOKEN_BYTES : HEADER_BYTES] = token
    store.set("memory", f"{shared_memory.path_of(os.getpid(), fd)} {token.hex()}")
    return memory, fd


def _open(store: Store, num_bytes: int) -> mmap.mmap | None:
    """On the other ranks, open the memory that rank 0 offers. Returns None if this rank can't.

    A token distinguishes rank 0's memory from a file that has the same path on another node.
    """
    path, _, token = store.get("memory").decode().partition(" ")
    memory = shared_memory.open_at(path, num_bytes)
    is_right = memory is not None and memory[HEADER_BYTES - _TOKEN_BYTES : HEADER_BYTES] == bytes.fromhex(token)
    return memory if is_right else None
