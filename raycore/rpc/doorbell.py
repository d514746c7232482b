"""How processes of one node tell each other that a message is there, and how they wait for it.

A `Board` is one page that an engine shares with its workers. Each channel has a counter byte on it, which its writer
raises after each write, so that readers look at a byte instead of taking the channel's lock; each process has a
byte that says whether it sleeps. A `Bell` is the socket on which a sleeper is woken: writers ring only those that
sleep, so that a busy pair pays no system call. Both exist on Linux only, and nothing depends on them but speed: a
process without them looks again and again, with pauses in between.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from raycore.node import shared_memory

T = TypeVar("T")

LINE = 64
"""Bytes of a cache line: what different processes write lies on different ones where it matters."""
CLOSED = 0
REQUESTS = LINE
REPLIES = 2 * LINE
TOKEN_BYTES = 16

FIRST_NAP_S = 0.001
LONGEST_NAP_S = 1.0
"""A sleeper looks up by itself after `FIRST_NAP_S`, then ever more rarely, up to this. The bell alone would do, were it
not for processors that let a store (I sleep) and a load (is there anything?) pass each other."""
FIRST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 0.002
"""Pauses between two looks where there is no bell. They grow with the time waited."""


class BoardAddress(NamedTuple):
    """Where a board is: the engine's file descriptor, as seen through /proc, and what tells it from any other file."""

    pid: int
    fd: int
    token: bytes
    num_workers: int


class Board:
    """The shared page. Indexing gives its bytes; `replies` and `sleeping()` say which byte is whose."""

    def __init__(self, num_workers: int, token: bytes, memory: mmap.mmap) -> None:
        self.memory = memory
        self.token = token
        self.num_workers = num_workers
        self.replies = slice(REPLIES, REPLIES + num_workers)
        self._sleepers = REPLIES + _round_up(num_workers)

    @staticmethod
    def create(num_workers: int) -> tuple[Board, int] | None:
        """A new board and its file descriptor, or None where there can't be one."""
        if sys.platform != "linux":
            return None
        size = _size(num_workers)
        token = os.urandom(TOKEN_BYTES)
        memory, fd = shared_memory.create("raycore-board", size)
        memory[size - TOKEN_BYTES :] = token
        return Board(num_workers, token, memory), fd

    @staticmethod
    def open(address: BoardAddress) -> Board | None:
        """The engine's board, or None if this process can't see it: another node, another container, another user."""
        size = _size(address.num_workers)
        memory = shared_memory.open_at(shared_memory.path_of(address.pid, address.fd), size)
        if memory is None or memory[size - TOKEN_BYTES :] != address.token:
            return None
        return Board(address.num_workers, address.token, memory)

    def raise_counter(self, index: int) -> None:
        """Say that one more message was written. Each counter has one writer."""
        self.memory[index] = (self.memory[index] + 1) & 0xFF

    def sleeper(self, member: int) -> int:
        """The byte that says whether `member` sleeps: a worker's rank, or `num_workers` for the engine."""
        return self._sleepers + member


def _round_up(count: int) -> int:
    return -(-count // LINE) * LINE


def _size(num_workers: int) -> int:
    used = REPLIES + _round_up(num_workers) + _round_up(num_workers + 1) + TOKEN_BYTES
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


class Bell:
    """One member's socket. It has a name in the abstract namespace, so that no file is left behind."""

    def __init__(self, board: Board, member: int) -> None:
        self._memory = board.memory
        self._member = member
        self._closed = False
        self._in_use = threading.Lock()
        self._flag = board.sleeper(member)
        self._names = [f"\0raycore-{board.token.hex()}-{i}" for i in range(board.num_workers + 1)]
        self._flags = [board.sleeper(i) for i in range(board.num_workers + 1)]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._names[member])

    def ring(self, member: int) -> bool:
        """Wake `member` if it sleeps. False if it can't be reached."""
        if not self._memory[self._flags[member]]:
            return True
        self._memory[self._flags[member]] = 0  # one ring is enough, whoever else has something for it
        return self.knock(member)

    def knock(self, member: int) -> bool:
        """Send a ring, sleeping or not. False if `member` can't be reached."""
        try:
            self._socket.sendto(b"", socket.MSG_DONTWAIT, self._names[member])
        except BlockingIOError:
            return True  # rings enough are waiting there
        except OSError:
            return False
        return True

    def sleep(self, look: Callable[[], T | None], longest_s: float) -> T | None:
        """Sleep until rung, at most `longest_s`, unless a last look finds something. Returns at once when closed."""
        with self._in_use:
            if self._closed:
                return None
            self._memory[self._flag] = 1
            os.sched_yield()  # between the two accesses that must not pass each other
            found = look()
            if found is None:
                self._receive(longest_s)
            self._memory[self._flag] = 0
            return found

    def close(self) -> None:
        """Wake this process's sleeper and give the name back. From any thread."""
        self._closed = True
        self.knock(self._member)
        with self._in_use:
            self._socket.close()

    def _receive(self, longest_s: float) -> None:
        seconds, fraction = divmod(longest_s, 1.0)
        # the kernel's own time-out: one system call instead of poll() and recv()
        timeout = struct.pack("ll", int(seconds), max(1, int(fraction * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(1)


class Waiter:
    """One process's way of waiting: look for `spin_window_s`, then sleep between looks."""

    def __init__(self, spin_window_s: float, bell: Bell | None, must_poll: bool) -> None:
        """`must_poll`: some of what is waited for comes without a ring."""
        self._window_s = spin_window_s
        self._bell = bell
        self._must_poll = must_poll or bell is None

    def wait(self, look: Callable[[], T | None], deadline_s: float) -> T | None:
        """What `look()` finds, or None if it finds nothing by `deadline_s`. What it raises ends the wait."""
        found = look()
        if found is not None:
            return found
        started_s = now_s = time.monotonic()
        end_s = min(started_s + self._window_s, deadline_s)
        while now_s < end_s:
            os.sched_yield()  # to whoever is to write what we look for, if cores are few
            found = look()
            if found is not None:
                return found
            now_s = time.monotonic()
        return self._sleep(look, started_s, deadline_s)

    def _sleep(self, look: Callable[[], T | None], started_s: float, deadline_s: float) -> T | None:
        nap_s = FIRST_NAP_S
        while (now_s := time.monotonic()) < deadline_s:
            if self._must_poll:
                nap_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S + (now_s - started_s) / 8)
            if self._bell is None:
                time.sleep(min(nap_s, deadline_s - now_s))
                found = look()
            else:
                found = self._bell.sleep(look, min(nap_s, deadline_s - now_s))
                found = look() if found is None else found
            if found is not None:
                return found
            nap_s = min(LONGEST_NAP_S, nap_s * 2)
        return None
