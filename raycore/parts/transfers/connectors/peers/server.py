"""Lets workers of other ranks read a worker's blocks, on threads of its own.

Nothing outlives the process: a socket on this machine has a name in Linux's abstract namespace, and memory is a
reader's, which passes its descriptor.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import mmap
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raycore.parts.transfers.connectors.peers import wire
from raycore.parts.transfers.connectors.peers.blocks import BlockStore, Held, HeldBlocks, checksum
from raycore.parts.transfers.connectors.peers.wire import MISSING, Blocks, Broken, Hello, PeerAddress, Read, Welcome
from raycore.system import os, secrets, socket, threading, time

logger = logging.getLogger(__name__)

HELLO_S = 5.0
"""How long, in seconds, a reader may take to say who it is."""
ANSWER_S = 30.0
"""How long the rest of a message, and the sending of an answer, may take."""
MAX_READERS = 256
_IDLE_S = 1.0
"""How often a thread that waits for a reader checks whether the server is closed."""
_BLOCKS_PER_ANSWER = 4
"""So many blocks are copied before the reader is told of them, and copies them, too, meanwhile."""
_TOKEN_BYTES = 16
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """What names this machine since its start. Empty: sockets and memory can't be passed to other processes here."""
    if sys.platform != "linux":
        return ""
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def own_host() -> str:
    """The address at which other machines reach this one, as far as it can be known. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("198.51.100.1", 9))  # an address for documentation: only the route to it counts
        return str(probe.getsockname()[0])
    return "127.0.0.1"


class BlockServer:
    """Serves the blocks of `held`. Other threads may change `held` at any time.

    `address` is what readers need.
    """

    def __init__(
        self,
        store: BlockStore,
        held: HeldBlocks,
        on_released: Callable[[Sequence[str]], object] = lambda names: None,
        host: str | None = None,
    ) -> None:
        """Listen.

        Args:
            on_released: called on a thread of the server with the names of leases that readers need no more.
            host: this machine's address, for readers on others. None: as this machine knows it. Empty: only readers on
                this machine are served.
        """
        self._store: BlockStore | None = store
        self._held = held
        self._on_released = on_released
        self._layout = store.layout
        self._block_bytes = store.block_bytes
        self._lock = threading.Lock()
        """Held while a block is copied, so that `release` returns only when none is."""
        self._is_closed = False
        self._readers: set[socket.socket] = set()
        self._listeners: list[socket.socket] = []
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self.address = self._listen(own_host() if host is None else host)
        for listener in self._listeners:
            threading.Thread(target=self._accept, args=(listener,), name="raycore-kv-accept", daemon=True).start()

    def release(self) -> None:
        """Read no more blocks until `resume`. When this returns, no thread reads one."""
        with self._lock:
            self._store = None

    def resume(self, store: BlockStore) -> None:
        """Serve blocks again, from a cache that was allocated again."""
        with self._lock:
            self._store = store

    def close(self) -> None:
        """End all connections. Idempotent."""
        self._is_closed = True
        self.release()
        for each in [*self._listeners, *list(self._readers)]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def copy(self, digest: bytes, out: NDArray[np.uint8]) -> int:
        """Copy a block for a reader. Returns its checksum, or `MISSING`."""
        held = self._held.find(digest)
        if held is None or not self._read(held, out):
            return MISSING
        return checksum(digest, out) if self._held.is_unchanged(digest, held) else MISSING

    def _read(self, held: Held, out: NDArray[np.uint8]) -> bool:
        with self._lock:
            if self._store is None:
                return False
            self._store.read(held.block, out)
            return True

    def _listen(self, host: str) -> PeerAddress:
        machine, local_name, port = machine_id(), "", 0
        if machine:
            local_name = f"raycore-kv-{os.getpid()}-{secrets.token_hex(8)}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind(f"\0{local_name}")
            self._listeners.append(local)
        if host:
            try:
                network = socket.create_server((host, 0))
            except OSError as error:
                logger.warning(
                    "ranks on other nodes can't read blocks from this one: can't listen at %s: %s", host, error
                )
            else:
                port = int(network.getsockname()[1])
                self._listeners.append(network)
        for listener in self._listeners:
            listener.listen()
        return PeerAddress(machine, local_name, host, port, self._token, self._layout)

    def _accept(self, listener: socket.socket) -> None:
        while not self._is_closed:
            try:
                reader, _ = listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_IDLE_S)  # too many files are open, for example
                continue
            if len(self._readers) >= MAX_READERS:
                reader.close()
                continue
            self._readers.add(reader)
            threading.Thread(target=self._serve, args=(reader,), name="raycore-kv-serve", daemon=True).start()

    def _serve(self, reader: socket.socket) -> None:
        leases: set[str] = set()
        try:
            memory = self._welcome(reader)
            while (read := self._next_read(reader)) is not None:
                if read.lease:
                    leases.add(read.lease)
                if read.released:
                    leases.difference_update(read.released)
                    self._on_released(read.released)
                self._answer(reader, read.digests, memory)
        except Broken as error:
            if not self._is_closed:
                logger.info("a reader of blocks is gone: %s", error)
        except Exception:
            logger.exception("can't serve a reader of blocks")
        finally:
            if leases:
                self._on_released(list(leases))
            self._readers.discard(reader)
            reader.close()

    def _welcome(self, reader: socket.socket) -> NDArray[np.uint8] | None:
        """Answer a reader's `Hello`. Returns the memory that it gets blocks in. None: they go over the network."""
        hello, fds = self._hello(reader)
        try:
            memory = None
            refused = ""
            if hello.layout != self._layout:
                refused = f"blocks here have the layout {self._layout}, not {hello.layout}"
            elif hello.memory_bytes:
                memory = _map(fds, hello.memory_bytes)
                refused = "" if memory is not None else "the memory can't be mapped"
        finally:
            for fd in fds:
                os.close(fd)
        wire.send(reader, Welcome(refused), time.monotonic() + ANSWER_S)
        if refused:
            raise Broken(refused)
        return memory

    def _hello(self, reader: socket.socket) -> tuple[Hello, list[int]]:
        deadline_s = time.monotonic() + HELLO_S
        fds: list[int] = []
        try:
            reader.settimeout(HELLO_S)
            if reader.family == socket.AF_UNIX:
                first, fds, _, _ = socket.recv_fds(reader, 1, 1)
            else:
                first = reader.recv(1)
        except OSError as error:
            raise Broken(f"no hello: {error}") from error
        try:
            rest = bytearray(3)
            wire.receive_into(reader, memoryview(rest), deadline_s)
            hello = wire.receive_rest(reader, Hello, first + rest, deadline_s, wire.MAX_HELLO_BYTES)
            if not hmac.compare_digest(hello.token, self._token):
                raise Broken("the token is wrong")
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return hello, fds

    def _next_read(self, reader: socket.socket) -> Read | None:
        """Wait for what the reader wants next. None: it is gone, or the server is closed."""
        first = b""
        while not first:
            if self._is_closed:
                return None
            try:
                reader.settimeout(_IDLE_S)
                first = reader.recv(1)
            except TimeoutError:
                continue
            except OSError:
                return None
            if not first:
                return None
        rest, deadline_s = bytearray(3), time.monotonic() + ANSWER_S
        wire.receive_into(reader, memoryview(rest), deadline_s)
        return wire.receive_rest(reader, Read, first + rest, deadline_s)

    def _answer(self, reader: socket.socket, digests: Sequence[bytes], memory: NDArray[np.uint8] | None) -> None:
        size = self._block_bytes
        if memory is not None and len(digests) * size > len(memory):
            raise Broken(f"{len(digests)} blocks of {size} bytes don't fit into {len(memory)} bytes")
        own = None if memory is not None else np.empty(_BLOCKS_PER_ANSWER * size, np.uint8)
        for first in range(0, len(digests), _BLOCKS_PER_ANSWER):
            part = digests[first : first + _BLOCKS_PER_ANSWER]
            out = own if memory is None else memory[first * size :]
            assert out is not None
            found: list[int] = []
            end = 0
            for digest in part:
                found.append(self.copy(digest, out[end : end + size]))
                # in shared memory, each block has its place
                end += size if memory is not None or found[-1] != MISSING else 0
            payload: Any = b"" if memory is not None else out[:end].data
            wire.send(reader, Blocks(found), time.monotonic() + ANSWER_S, payload)


def _map(fds: Sequence[int], num_bytes: int) -> NDArray[np.uint8] | None:
    """Map a reader's memory. None: it sent none of this size."""
    if len(fds) != 1 or num_bytes <= 0:
        return None
    try:
        if os.fstat(fds[0]).st_size != num_bytes:
            return None
        return np.frombuffer(mmap.mmap(fds[0], num_bytes), np.uint8)
    except (OSError, ValueError):
        return None
