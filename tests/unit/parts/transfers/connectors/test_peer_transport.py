"""Blocks that one worker reads from another: what arrives, and what becomes of all that doesn't."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from waiting import LONG_S, eventually

from raycore.parts.transfers.connectors.peers import server as server_module
from raycore.parts.transfers.connectors.peers.blocks import HeldBlocks
from raycore.parts.transfers.connectors.peers.reader import BlockReader, Fetched, FetchJob, _Connection
from raycore.parts.transfers.connectors.peers.server import BlockServer
from raycore.parts.transfers.connectors.peers.wire import PeerAddress

SIZE = 4096


class Store:
    """A cache of 64 blocks."""

    block_bytes = SIZE

    def __init__(self, seed: int = 0, layout: str = "layout") -> None:
        self.layout = layout
        self.data = np.random.default_rng(seed).integers(0, 256, (64, SIZE), np.uint8)

    def read(self, block: int, out: NDArray[np.uint8]) -> None:
        out[:] = self.data[block]

    def write(self, block: int, data: NDArray[np.uint8]) -> None:
        self.data[block] = data


def digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


class Pair:
    """An owner, whose block n has the digest n, and a reader."""

    def __init__(self, server_class: type[BlockServer] = BlockServer) -> None:
        self.owned, self.own = Store(1), Store(2)
        self.held = HeldBlocks()
        self.held.add([digest(number) for number in range(64)], range(64))
        self.released: list[str] = []
        self.server = server_class(self.owned, self.held, self.released.extend, "127.0.0.1")
        self.reader = BlockReader(self.own)

    def fetch(
        self, count: int, address: PeerAddress | None = None, timeout_s: float = 20.0, lease: str = ""
    ) -> Fetched:
        """Read the first `count` blocks into the reader's last ones."""
        digests = [digest(number) for number in range(count)]
        blocks = [63 - number for number in range(count)]
        job = FetchJob(7, address or self.server.address, digests, blocks, time.monotonic() + timeout_s, lease)
        self.reader.start(job)
        return self.result()

    def result(self) -> Fetched:
        (fetched,) = eventually(self.reader.take_done)
        return fetched

    def has_first(self, count: int) -> bool:
        return bool((self.own.data[64 - count :][::-1] == self.owned.data[:count]).all())

    def close(self) -> None:
        self.server.close()
        self.reader.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def network(address: PeerAddress) -> PeerAddress:
    """The address as a worker on another machine uses it."""
    return replace(address, machine="another")


@pytest.mark.parametrize("is_local", [True, False])
def test_blocks_arrive_as_they_are(pair: Pair, is_local: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("raycore.parts.transfers.connectors.peers.reader.MEMORY_BYTES", 7 * SIZE)  # several reads
    address = pair.server.address if is_local else network(pair.server.address)
    for _ in range(2):  # over a new connection, and over the same again
        pair.own.data[:] = 0
        fetched = pair.fetch(20, address)
        assert (fetched.failed_blocks, fetched.num_bytes, fetched.is_local) == ([], 20 * SIZE, is_local)
        assert pair.has_first(20)
        assert not pair.own.data[:44].any()


@pytest.mark.parametrize("is_local", [True, False])
def test_what_the_owner_lacks_fails_with_all_after_it(pair: Pair, is_local: bool):
    pair.held.remove([digest(5)])
    fetched = pair.fetch(9, pair.server.address if is_local else network(pair.server.address))
    assert fetched.failed_blocks == [58, 57, 56, 55]
    assert pair.has_first(5)
    assert pair.fetch(5).failed_blocks == []


def test_a_block_that_is_reused_during_its_copy_counts_as_missing():
    pair = Pair()
    read = pair.owned.read

    def overwrite(block: int, out: NDArray[np.uint8]) -> None:
        read(block, out)
        if block == 3:  # the step after takes the block: first its digest is removed, then it is written
            pair.held.remove([digest(3)])
            pair.owned.data[3] = 1
            pair.held.add([digest(3)], [3])

    pair.owned.read = overwrite
    assert pair.fetch(6).failed_blocks == [60, 59, 58]
    pair.close()


class CorruptingServer(BlockServer):
    """Changes a bit of block 2 on the way."""

    def copy(self, digest: bytes, out: NDArray[np.uint8]) -> int:
        found = super().copy(digest, out)
        if digest[0] == 2:
            out[100] ^= 4
        return found


class StaleServer(BlockServer):
    """Sends block 2's checksum with what was in the memory before."""

    def copy(self, digest: bytes, out: NDArray[np.uint8]) -> int:
        return super().copy(digest, np.empty_like(out) if digest[0] == 2 else out)


class SwappingServer(BlockServer):
    """Sends another block, complete and with its own checksum, instead of block 2."""

    def copy(self, digest: bytes, out: NDArray[np.uint8]) -> int:
        return super().copy(b"\3" + digest[1:] if digest[0] == 2 else digest, out)


@pytest.mark.parametrize("server_class", [CorruptingServer, StaleServer, SwappingServer])
@pytest.mark.parametrize("is_local", [True, False])
def test_what_is_not_the_block_is_not_written(server_class: type[BlockServer], is_local: bool):
    pair = Pair(server_class)
    before = pair.own.data.copy()
    fetched = pair.fetch(4, pair.server.address if is_local else network(pair.server.address))
    assert fetched.failed_blocks == [61, 60]
    assert "content" in fetched.why_failed
    assert pair.has_first(2)
    assert (pair.own.data[:62] == before[:62]).all()
    pair.close()


class SlowServer(BlockServer):
    """Takes long for block 2."""

    is_slow = threading.Event()

    def copy(self, digest: bytes, out: NDArray[np.uint8]) -> int:
        if digest[0] == 4:
            self.is_slow.wait(LONG_S)
        return super().copy(digest, out)


@pytest.mark.parametrize("is_local", [True, False])
def test_what_is_late_fails_and_is_not_written_afterwards(is_local: bool):
    SlowServer.is_slow.clear()
    pair = Pair(SlowServer)
    address = pair.server.address if is_local else network(pair.server.address)
    fetched = pair.fetch(8, address, timeout_s=2.0)
    assert fetched.failed_blocks == [59, 58, 57, 56]
    before = pair.own.data.copy()
    SlowServer.is_slow.set()
    assert pair.fetch(3, address).failed_blocks == []  # over another connection
    assert (pair.own.data[:61] == before[:61]).all()
    pair.close()


def test_a_dead_owner_fails_all(pair: Pair):
    assert pair.fetch(3).failed_blocks == []
    pair.server.close()
    assert pair.fetch(3).failed_blocks == [63, 62, 61]
    assert pair.fetch(3).failed_blocks == [63, 62, 61]


def test_other_layouts_and_tokens_are_refused(pair: Pair):
    pair.own.layout = "another"
    fetched = pair.fetch(3)
    assert fetched.failed_blocks == [63, 62, 61]
    assert "layout" in fetched.why_failed
    pair.own.layout = "layout"
    assert pair.fetch(3, replace(pair.server.address, token=b"wrong")).failed_blocks == [63, 62, 61]
    assert pair.fetch(3).failed_blocks == []


@pytest.mark.parametrize("said", [b"\xff\xff\xff\xff", b"\3\0\0\0abc", b"GET / HTTP/1.1\r\n\r\n"])
def test_strangers_are_sent_away(pair: Pair, said: bytes):
    with socket.create_connection(("127.0.0.1", pair.server.address.port), 10) as stranger:
        stranger.sendall(said)
        with suppress(ConnectionResetError):  # if the server hasn't read everything
            assert stranger.recv(100) == b""
    assert pair.fetch(3).failed_blocks == []


def test_strangers_who_say_nothing_are_sent_away(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server_module, "HELLO_S", 0.1)
    with socket.create_connection(("127.0.0.1", pair.server.address.port), 10) as stranger:
        assert stranger.recv(100) == b""


def test_leases_are_released_after_the_read(pair: Pair):
    assert pair.fetch(3, lease="lease 1").failed_blocks == []
    eventually(lambda: pair.released == ["lease 1"])


@pytest.mark.parametrize("is_local", [True, False])
def test_leases_of_blocks_that_are_not_read_end_too(pair: Pair, is_local: bool):
    address = pair.server.address if is_local else network(pair.server.address)
    assert pair.fetch(0, address, lease="of none").failed_blocks == []
    eventually(lambda: pair.released == ["of none"])
    pair.held.remove([digest(5)])
    assert len(pair.fetch(64, address, lease="of some").failed_blocks) == 59
    eventually(lambda: "of some" in pair.released)
    job = FetchJob(9, address, [digest(0)], [0], time.monotonic() + 20, "cancelled")
    job.is_cancelled = True
    pair.reader.start(job)
    assert pair.result().failed_blocks == [0]
    eventually(lambda: "cancelled" in pair.released)


def test_the_lease_of_a_reader_that_dies_ends(pair: Pair):
    deadline_s = time.monotonic() + 20
    connection = _Connection(pair.server.address, pair.own, deadline_s)
    assert next(connection.read([digest(0), digest(1)], "of the dead", deadline_s)) is not None
    assert pair.released == []
    connection.close()
    eventually(lambda: pair.released == ["of the dead"])


def test_nothing_is_read_or_written_while_a_cache_is_given_up(pair: Pair):
    pair.reader.release()
    assert pair.fetch(3).failed_blocks == [63, 62, 61]
    pair.reader.resume(pair.own)
    pair.server.release()
    assert pair.fetch(3).failed_blocks == [63, 62, 61]
    pair.server.resume(pair.owned)
    assert pair.fetch(3).failed_blocks == []


def test_a_cancelled_job_ends_and_writes_nothing_more():
    SlowServer.is_slow.clear()
    pair = Pair(SlowServer)
    digests = [digest(number) for number in range(8)]
    pair.reader.start(FetchJob(9, pair.server.address, digests, list(range(8)), time.monotonic() + 20))
    pair.reader.cancel(9)
    SlowServer.is_slow.set()
    fetched = pair.result()
    assert fetched.key == 9
    assert fetched.failed_blocks
    pair.close()


def test_versions_tell_one_content_from_the_next():
    held = HeldBlocks()
    held.add([b"a"], [1])
    first = held.find(b"a")
    assert first is not None
    held.add([b"a"], [2])
    assert held.find(b"a") == first
    held.remove([b"a", b"unknown"])
    held.add([b"a"], [1])
    assert not held.is_unchanged(b"a", first)
    held.clear()
    assert held.find(b"a") is None
