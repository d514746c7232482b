"""Reads blocks from workers of other ranks, on threads of its own, and writes them into this worker's cache.

Each read has a deadline. A connection on which anything was late or wrong isn't used again, with the memory that the
other worker may still write to.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raycore.node import shared_memory
from raycore.parts.transfers.connectors.peers import wire
from raycore.parts.transfers.connectors.peers.blocks import BlockStore, checksum
from raycore.parts.transfers.connectors.peers.server import machine_id
from raycore.parts.transfers.connectors.peers.wire import MISSING, Blocks, Broken, Hello, PeerAddress, Read, Welcome
from raycore.system import os, queue, socket, threading, time

logger = logging.getLogger(__name__)

MEMORY_BYTES = 16 << 20
"""Blocks are read in parts of this size, but at least one block."""
MAX_BLOCKS_PER_READ = 1024
MAX_IDLE = 4
"""Number of connections that are kept for later jobs, with their memory."""
_CONNECT_S = 5.0
_JOIN_S = 10.0


@dataclass(eq=False)
class FetchJob:
    """Blocks to read from one worker."""

    key: int
    """What the result is known by."""
    address: PeerAddress
    digests: list[bytes]
    blocks: list[int]
    """Where they are written."""
    deadline_s: float
    """A time of `time.monotonic()`. What hasn't arrived then has failed."""
    lease: str = ""
    """The lease that isn't needed afterwards. Empty: there is none."""
    is_cancelled: bool = field(default=False, init=False)


class Fetched(NamedTuple):
    """The end of a job."""

    key: int
    failed_blocks: list[int]
    num_bytes: int
    """Of the blocks that arrived."""
    took_s: float
    is_local: bool
    """Whether they came through shared memory."""
    why_failed: str
    """Empty: all arrived, or the owner didn't have the others."""


class _Connection:
    """A connection to one worker. One thread at a time uses it."""

    def __init__(self, address: PeerAddress, store: BlockStore, deadline_s: float) -> None:
        """Raises Broken if the worker can't be reached, or refuses."""
        self.block_bytes = store.block_bytes
        self.memory: NDArray[np.uint8] | None = None
        deadline_s = min(deadline_s, time.monotonic() + _CONNECT_S)
        self._socket, self.is_local = _connect(address, deadline_s)
        try:
            self._greet(address, store, deadline_s)
        except BaseException:
            self.close()
            raise

    @property
    def blocks_per_read(self) -> int:
        """How many blocks a read may ask for."""
        return max(1, min(MAX_BLOCKS_PER_READ, MEMORY_BYTES // self.block_bytes))

    def read(self, digests: Sequence[bytes], lease: str, deadline_s: float) -> Iterator[NDArray[np.uint8] | None]:
        """Read blocks, at most `blocks_per_read`: yield them as they arrive, and None for those that the owner lacks.

        Raises:
            Broken: they didn't arrive in time, or aren't what they should be, or the connection broke.
        """
        wire.send(self._socket, Read(list(digests), lease), deadline_s)
        num_read = 0
        while num_read < len(digests):
            sums = wire.receive(self._socket, Blocks, deadline_s).checksums
            if not 0 < len(sums) <= len(digests) - num_read:
                raise Broken(f"an answer has {len(sums)} blocks, {len(digests) - num_read} were left")
            for expected in sums:
                data = self._take(num_read, deadline_s) if expected != MISSING else None
                if data is not None and checksum(digests[num_read], data) != expected:
                    raise Broken("a block's content isn't what was sent")
                num_read += 1
                yield data

    def release(self, lease: str, deadline_s: float) -> None:
        """Tell the owner that a lease isn't needed any more. Raises Broken."""
        wire.send(self._socket, Read(released=[lease]), deadline_s)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()
        self.memory = None

    def _greet(self, address: PeerAddress, store: BlockStore, deadline_s: float) -> None:
        hello = Hello(address.token, store.layout)
        size = self.blocks_per_read * self.block_bytes
        if self.is_local:
            memory, fd = shared_memory.create("raycore-kv-blocks", size)
            self.memory = np.frombuffer(memory, np.uint8)
            try:
                _send_with(self._socket, Hello(address.token, store.layout, size), fd, deadline_s)
            finally:
                os.close(fd)
        else:
            self.memory = np.frombuffer(mmap.mmap(-1, size), np.uint8)
            wire.send(self._socket, hello, deadline_s)
        welcome = wire.receive(self._socket, Welcome, deadline_s)
        if welcome.refused:
            raise Broken(welcome.refused)

    def _take(self, index: int, deadline_s: float) -> NDArray[np.uint8]:
        assert self.memory is not None
        data = self.memory[index * self.block_bytes : (index + 1) * self.block_bytes]
        if not self.is_local:
            wire.receive_into(self._socket, data.data, deadline_s)
        return data


class BlockReader:
    """Runs jobs on a few threads. Thread-safe."""

    def __init__(self, store: BlockStore, num_threads: int = 2) -> None:
        """`num_threads`: how many jobs run at the same time."""
        self._store: BlockStore | None = store
        self._jobs: queue.SimpleQueue[FetchJob | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        """Held while a block is written, so that `release` returns only when none is."""
        self._idle: list[tuple[PeerAddress, _Connection]] = []
        """Connections that no job uses, the last used one last."""
        self._unfinished: set[FetchJob] = set()
        self._done: list[Fetched] = []
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def start(self, job: FetchJob) -> None:
        """Start a job."""
        with self._lock:
            if not self._threads:
                self._start_threads()
            self._unfinished.add(job)
        self._jobs.put(job)

    def cancel(self, key: int) -> None:
        """Let a job end soon. Its blocks that haven't been written count as failed."""
        with self._lock:
            for job in self._unfinished:
                if job.key == key:
                    job.is_cancelled = True

    def take_done(self) -> list[Fetched]:
        """Return the jobs that have ended since the last call."""
        if not self._done:
            return []
        with self._lock:
            done, self._done = self._done, []
        return done

    @property
    def has_unfinished(self) -> bool:
        """Whether a job hasn't ended."""
        return bool(self._unfinished)

    def release(self) -> None:
        """Write no more blocks until `resume`. When this returns, no thread writes one, and all jobs have ended."""
        with self._lock:
            for job in self._unfinished:
                job.is_cancelled = True
        with self._writing:
            self._store = None
        deadline_s = time.monotonic() + _JOIN_S
        while self.has_unfinished and time.monotonic() < deadline_s:
            time.sleep(0.001)

    def resume(self, store: BlockStore) -> None:
        """Write blocks again, to a cache that was allocated again."""
        with self._writing:
            self._store = store

    def close(self) -> None:
        """End all jobs and connections. Idempotent."""
        self._is_closed = True
        with self._lock:
            for job in self._unfinished:
                job.is_cancelled = True
        with self._writing:
            self._store = None
        for _ in self._threads:
            self._jobs.put(None)
        self._close_idle()

    # ---- on the threads

    def _start_threads(self) -> None:
        self._threads = [
            threading.Thread(target=self._run_jobs, name="raycore-kv-read", daemon=True)
            for _ in range(self._num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                fetched = self._run(job)
            except Exception as error:
                logger.exception("reading blocks failed")
                fetched = Fetched(job.key, list(job.blocks), 0, 0.0, False, str(error))
            with self._lock:
                self._unfinished.discard(job)
                self._done.append(fetched)

    def _run(self, job: FetchJob) -> Fetched:
        """Run a job. What was written before a failure stays."""
        started_s = time.monotonic()
        num_written, is_local, why = 0, False, ""
        connection: _Connection | None = None
        try:
            connection = self._connection(job)
            is_local = connection.is_local
            for data in () if job.is_cancelled else self._read(job, connection):
                if data is None or not self._write(job, job.blocks[num_written], data):
                    break
                num_written += 1
            if job.lease:
                connection.release(job.lease, job.deadline_s)
            is_complete = num_written == len(job.blocks)
            self._give_back(job.address, connection, is_reusable=is_complete)
        except Broken as error:
            why = str(error)
            if connection is not None:
                connection.close()
        num_bytes = num_written * (connection.block_bytes if connection is not None else 0)
        took_s = time.monotonic() - started_s
        return Fetched(job.key, job.blocks[num_written:], num_bytes, took_s, is_local, why)

    def _read(self, job: FetchJob, connection: _Connection) -> Iterator[NDArray[np.uint8] | None]:
        count = connection.blocks_per_read
        for first in range(0, len(job.digests), count):
            yield from connection.read(job.digests[first : first + count], job.lease, job.deadline_s)

    def _write(self, job: FetchJob, block: int, data: NDArray[np.uint8]) -> bool:
        with self._writing:
            if job.is_cancelled or self._store is None:
                return False
            self._store.write(block, data)
            return True

    # ---- connections

    def _connection(self, job: FetchJob) -> _Connection:
        with self._lock:
            for place, (address, connection) in enumerate(self._idle):
                if address == job.address:
                    del self._idle[place]
                    return connection
            store = self._store
        if store is None or (job.is_cancelled and not job.lease):
            raise Broken("the cache was given up")
        return _Connection(job.address, store, job.deadline_s)

    def _give_back(self, address: PeerAddress, connection: _Connection, *, is_reusable: bool) -> None:
        """Keep a connection for later jobs. One with an answer under way is closed instead."""
        closing = [connection]
        with self._lock:
            if is_reusable and not self._is_closed:
                self._idle.append((address, connection))
                closing = [each for _, each in self._idle[:-MAX_IDLE]]
                del self._idle[:-MAX_IDLE]
        for each in closing:
            each.close()

    def _close_idle(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()


def _connect(address: PeerAddress, deadline_s: float) -> tuple[socket.socket, bool]:
    """Connect to a worker. Returns the socket, and whether memory can be passed over it.

    Raises:
        Broken: it can't be reached.
    """
    if address.local_name and address.machine == machine_id():
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        local.settimeout(max(0.001, deadline_s - time.monotonic()))
        with contextlib.suppress(OSError):  # in another container, for example
            local.connect(f"\0{address.local_name}")
            return local, True
        local.close()
    if not address.port:
        raise Broken("the worker can't be reached from this machine")
    try:
        network = socket.create_connection((address.host, address.port), max(0.001, deadline_s - time.monotonic()))
        network.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except OSError as error:
        raise Broken(f"can't connect to {address.host}:{address.port}: {error}") from error
    return network, False


def _send_with(connection: socket.socket, message: Hello, fd: int, deadline_s: float) -> None:
    """Send a message, and a descriptor with its first byte."""
    data = wire.framed(message)
    try:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        socket.send_fds(connection, [data[:1]], [fd])
        connection.sendall(data[1:])
    except OSError as error:
        raise Broken(f"can't send: {error}") from error
