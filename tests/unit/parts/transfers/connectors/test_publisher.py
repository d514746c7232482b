"""KV events over ZeroMQ, decoded with the layout that readers of vLLM's events use."""

import queue
import re
import socket
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from raycore.errors import InvalidConfig
from raycore.parts.transfers.config.kv_transfer import KVEventsConfig
from raycore.parts.transfers.connectors.events import AllBlocksCleared, BlockRemoved, BlockStored

zmq = pytest.importorskip("zmq")
publisher = pytest.importorskip("raycore.parts.transfers.connectors.publisher")


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class Stored(Event, tag="BlockStored"):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None


class Removed(Event, tag="BlockRemoved"):
    block_hashes: list[bytes | int]
    medium: str | None


class Cleared(Event, tag="AllBlocksCleared"):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[Stored | Removed | Cleared]
    data_parallel_rank: int | None = None


EVENTS = [BlockStored([b"a", b"b"], b"c", [1, 2, 3, 4], 2, None, "GPU", None), BlockRemoved([b"a"], "GPU")]


@pytest.fixture
def context() -> Iterator[Any]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def local(endpoint: str | None) -> str:
    """Where an endpoint that is bound at all interfaces is reached."""
    return f"tcp://127.0.0.1:{str(endpoint).rpartition(':')[2]}"


def subscribe(context: Any, endpoint: str, topic: bytes = b"") -> Any:
    reader = context.socket(zmq.SUB)
    reader.setsockopt(zmq.RCVTIMEO, 10_000)
    reader.setsockopt(zmq.SUBSCRIBE, topic)
    reader.connect(local(endpoint))
    return reader


def test_subscribers_get_the_batches_of_each_rank_at_its_own_port(context: Any) -> None:
    assert publisher.endpoint_of("tcp://*:5557", 1) == "tcp://*:5558"
    config = KVEventsConfig(True, "zmq", "tcp://*:0", topic="kv")
    rank = publisher.EventPublisher(config, dp_rank=1)
    try:
        reader = subscribe(context, rank.endpoint, b"kv")
        deadline_s = time.monotonic() + 10
        while not reader.poll(50):  # until it has subscribed, batches are lost to it
            assert time.monotonic() < deadline_s
            rank.publish([AllBlocksCleared()])
        rank.publish(EVENTS)
        numbers = []
        while True:
            topic, number, data = reader.recv_multipart()
            batch = msgspec.msgpack.decode(data, type=Batch)
            numbers.append(int.from_bytes(number, "big"))
            assert (topic, batch.data_parallel_rank) == (b"kv", 1)
            if batch.events != [Cleared()]:
                break
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        assert abs(batch.ts - time.time()) < 60
        assert batch.events == [Stored([b"a", b"b"], b"c", [1, 2, 3, 4], 2, None, "GPU", None), Removed([b"a"], "GPU")]
    finally:
        rank.close()


def test_missed_batches_are_sent_again(context: Any) -> None:
    config = KVEventsConfig(True, "zmq", "tcp://*:0", "tcp://*:0", buffer_steps=3)
    rank = publisher.EventPublisher(config, dp_rank=0)
    try:
        for number in range(5):
            rank.publish([BlockRemoved([bytes([number])], "GPU")])
        asking = context.socket(zmq.DEALER)
        asking.setsockopt(zmq.RCVTIMEO, 10_000)
        asking.connect(local(rank.replay_endpoint))
        found: list[tuple[int, list[Any]]] = []
        deadline_s = time.monotonic() + 10
        while [number for number, _ in found] != [3, 4]:
            assert time.monotonic() < deadline_s
            asking.send_multipart((b"", (3).to_bytes(8, "big")))
            found.clear()
            while True:
                _, number, data = asking.recv_multipart()
                if number == (-1).to_bytes(8, "big", signed=True):
                    break
                found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(data, type=Batch).events))
        assert found == [(3, [Removed([b"\3"], "GPU")]), (4, [Removed([b"\4"], "GPU")])]
    finally:
        rank.close()


def test_a_port_that_is_taken_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_BIND_S", 0.2)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"{port}' can't be bound"):
            publisher.EventPublisher(KVEventsConfig(True, "zmq", f"tcp://*:{port}"), 0)


def test_too_many_batches_are_dropped_and_block_nobody(caplog: pytest.LogCaptureFixture) -> None:
    rank = publisher.EventPublisher(KVEventsConfig(True, "zmq", "inproc://kv"), 0)
    real, rank._queue = rank._queue, queue.Queue(1)  # that nobody empties
    for _ in range(3):
        rank.publish(EVENTS)
    rank._queue = real
    rank.close()
    assert re.findall(r"(\d+) batches of KV events were dropped", caplog.text) == ["1"]
