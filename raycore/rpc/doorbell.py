"""How an engine and its workers on one node notify each other of messages, and how they wait for messages.

A `Board` is memory that an engine shares with its workers. It has one counter byte for each channel, which the writer
increments after each write. Readers check this byte, which is faster than taking the channel's lock. The board also has
one byte for each process, which is nonzero while the process sleeps. A `Bell` is a socket that wakes a sleeping
process. Writers ring only for processes that sleep, so busy processes notify each other without system calls. Boards
and bells need Linux and only save time: a process without them polls its channels, with pauses.
"""

from __future__ import annotations

import contextlib
import mmap
import struct
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from raycore.node import shared_memory
from raycore.system import os, socket, threading, time

T = TypeVar("T")

LINE = 64
"""Bytes of a cache line. The board's sections start on separate lines, which avoids false sharing between them."""
CLOSED = 0
REQUESTS = LINE
"""The counter of the first channel to workers. There are at most `LINE` such channels."""
REPLIES = 2 * LINE
TOKEN_BYTES = 16

FIRST_NAP_S = 0.001
LONGEST_NAP_S = 1.0
"""A process that sleeps also checks for messages without a ring: first after `FIRST_NAP_S` seconds, then after twice as
long each time, up to `LONGEST_NAP_S`. A ring can be missed, because a processor may reorder the store of "I sleep" and
the load that looks for a message."""
FIRST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 0.002
"""Shortest and usual longest pause in seconds between two polls, for a process that is not rung for every message.
Pauses get longer the longer the process waits."""


class BoardAddress(NamedTuple):
    """What a worker needs to open the engine's board. `token` proves that the file at `pid` and `fd` is the board."""

    pid: int
    fd: int
    token: bytes
    num_workers: int


class Board:
    """A board: bytes in shared memory. `CLOSED`, `REQUESTS`, `replies` and `sleeper()` are indexes into `memory`."""

    def __init__(self, num_workers: int, token: bytes, memory: mmap.mmap) -> None:
        self.memory = memory
        self.token = token
        self.num_workers = num_workers
        self.replies = slice(REPLIES, REPLIES + num_workers)
        self._sleepers = REPLIES + _round_up(num_workers)

    @staticmethod
    def create(num_workers: int) -> tuple[Board, int] | None:
        """Create a board. Returns the board and its file descriptor, or None if the platform is not Linux."""
        if sys.platform != "linux":
            return None
        size = _size(num_workers)
        token = os.urandom(TOKEN_BYTES)
        memory, fd = shared_memory.create("raycore-board", size)
        memory[size - TOKEN_BYTES :] = token
        return Board(num_workers, token, memory), fd

    @staticmethod
    def open(address: BoardAddress) -> Board | None:
        """Open the engine's board. Returns None if this process can't, for example because it is on another node."""
        size = _size(address.num_workers)
        memory = shared_memory.open_at(shared_memory.path_of(address.pid, address.fd), size)
        if memory is None or memory[size - TOKEN_BYTES :] != address.token:
            return None
        return Board(address.num_workers, address.token, memory)

    def raise_counter(self, index: int) -> None:
        """Increment the counter byte at `index`, modulo 256. Only the writer of the counter's channel does this."""
        self.memory[index] = (self.memory[index] + 1) & 0xFF

    def sleeper(self, member: int) -> int:
        """Index of the byte that is nonzero while `member` (a worker's rank, or `num_workers`: the engine) sleeps."""
        return self._sleepers + member


def _round_up(count: int) -> int:
    return -(-count // LINE) * LINE


def _size(num_workers: int) -> int:
    used = REPLIES + _round_up(num_workers) + _round_up(num_workers + 1) + TOKEN_BYTES
    return -(-used // mmap.PAGESIZE) * mmap.PAGESIZE


class Bell:
    """The socket that wakes one member of a board: a worker, or the engine as member number `num_workers`.

    The socket's name is in the abstract namespace, so no file can be left behind.
    """

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
        """Wake `member` if it sleeps. Returns False if it sleeps and cannot be reached."""
        if not self._memory[self._flags[member]]:
            return True
        self._memory[self._flags[member]] = 0  # one ring is enough: other writers don't need to ring
        return self.knock(member)

    def knock(self, member: int) -> bool:
        """Ring for `member` whether it sleeps or not. Returns False if it cannot be reached."""
        try:
            self._socket.sendto(b"", socket.MSG_DONTWAIT, self._names[member])
        except BlockingIOError:
            return True  # the member's socket is full of rings already
        except OSError:
            return False
        return True

    def sleep(self, look: Callable[[], T | None], longest_s: float) -> T | None:
        """Call `look()`. If it finds nothing, sleep until another member rings, at most `longest_s` seconds.

        Returns what `look()` found, or None. Returns None at once if the bell is closed.
        """
        with self._in_use:
            if self._closed:
                return None
            self._memory[self._flag] = 1
            os.sched_yield()  # makes it unlikely that the store above and the load in look() are reordered
            found = look()
            if found is None:
                self._receive(longest_s)
            self._memory[self._flag] = 0
            return found

    def close(self) -> None:
        """Wake the thread that is in `sleep()`, and release the socket's name. May be called from any thread."""
        self._closed = True
        self.knock(self._member)
        with self._in_use:
            self._socket.close()

    def _receive(self, longest_s: float) -> None:
        seconds, fraction = divmod(longest_s, 1.0)
        # a socket timeout, so that waiting is one recv() instead of poll() and recv()
        timeout = struct.pack("ll", int(seconds), max(1, int(fraction * 1e6)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        with contextlib.suppress(BlockingIOError):
            self._socket.recv(1)


class Waiter:
    """Waits for messages. Spins for `spin_window_s` seconds, then sleeps until the bell rings, or polls with pauses."""

    def __init__(
        self, spin_window_s: float, bell: Bell | None, must_poll: bool, longest_pause_s: float = LONGEST_PAUSE_S
    ) -> None:
        """Store the settings.

        Args:
            spin_window_s: how long to spin before sleeping, in seconds.
            bell: this process's own bell, if any.
            must_poll: look for messages from time to time, because they may arrive without a ring.
            longest_pause_s: the longest pause between two looks, if it must poll.
        """
        self._longest_pause_s = longest_pause_s
        self._window_s = spin_window_s
        self._bell = bell
        self._must_poll = must_poll or bell is None

    def wait(self, look: Callable[[], T | None], deadline_s: float) -> T | None:
        """Call `look()` until it returns something other than None. Returns that value, or None at `deadline_s`.

        `deadline_s` is a time of `time.monotonic()`. Exceptions of `look()` pass through.
        """
        found = look()
        if found is not None:
            return found
        started_s = now_s = time.monotonic()
        end_s = min(started_s + self._window_s, deadline_s)
        while now_s < end_s:
            os.sched_yield()  # lets the writer run if it needs this core
            found = look()
            if found is not None:
                return found
            now_s = time.monotonic()
        return self._sleep(look, started_s, deadline_s)

    def _sleep(self, look: Callable[[], T | None], started_s: float, deadline_s: float) -> T | None:
        nap_s = FIRST_NAP_S
        while (now_s := time.monotonic()) < deadline_s:
            if self._must_poll:
                nap_s = min(self._longest_pause_s, FIRST_PAUSE_S + (now_s - started_s) / 8)
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
