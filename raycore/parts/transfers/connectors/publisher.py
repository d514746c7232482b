"""Publishes KV events over ZeroMQ, as vLLM does: readers of vLLM's events can subscribe.

A message has three parts: the topic, the batch's number (8 bytes, big-endian, from 0 on), and the batch in msgpack.
Whoever missed some sends the first missing number to the replay endpoint, on a REQ or DEALER socket, and gets the kept
batches from there on as (number, batch), until one with the number -1.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from raycore.errors import InvalidConfig
from raycore.parts.transfers.config.kv_transfer import KVEventsConfig
from raycore.parts.transfers.connectors.events import KVCacheEvent, KVEventBatch
from raycore.recurring import Recurring
from raycore.system import queue, threading, time

logger = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_POLL_S = 0.05
"""How often the thread looks for requests to send something again."""
_BIND_S = 10.0
"""For how long a port may still be taken, by the rank that this one replaces."""
_JOIN_S = 2.0


class EventPublisher:
    """Publishes the batches of one rank, on a thread of its own."""

    def __init__(self, config: KVEventsConfig, dp_rank: int) -> None:
        """
        Raises:
            InvalidConfig: an endpoint can't be bound. The message names it.
        """
        self._dp_rank = dp_rank
        self._topic = config.topic.encode()
        self._queue: queue.Queue[KVEventBatch | None] = queue.Queue(config.max_queue_size)
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._num_dropped = 0
        self._drops = Recurring()
        self._context = zmq.Context()
        self._publishing = self._context.socket(zmq.PUB)
        self._publishing.set_hwm(config.hwm)
        self._replaying: zmq.Socket[bytes] | None = None
        try:
            self.endpoint = _open(self._publishing, "endpoint", endpoint_of(config.endpoint, dp_rank))
            self.replay_endpoint: str | None = None
            if config.replay_endpoint is not None:
                self._replaying = self._context.socket(zmq.ROUTER)
                replay = endpoint_of(config.replay_endpoint, dp_rank)
                self.replay_endpoint = _open(self._replaying, "replay_endpoint", replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="raycore-kv-events", daemon=True)
        self._thread.start()

    def publish(self, events: Sequence[KVCacheEvent]) -> None:
        """Publish a batch soon. Never blocks: if too many wait, the batch is dropped, and its number isn't used."""
        try:
            self._queue.put_nowait(KVEventBatch(time.time(), list(events), self._dp_rank))  # pyright: ignore[reportArgumentType]
        except queue.Full:
            self._num_dropped += 1
            if self._drops.is_due():
                logger.warning("%d batches of KV events were dropped: they are published too slowly", self._num_dropped)

    def close(self) -> None:
        """Publish what waits, and end. Idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):
                self._queue.put(None, timeout=_JOIN_S)
            self._thread.join(_JOIN_S)
        if not self._thread.is_alive():
            self._context.destroy(linger=100)

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        number = 0
        while True:
            self._answer()
            # takes in new subscriptions, which would otherwise count only from the second batch on
            self._publishing.getsockopt(zmq.EVENTS)
            try:
                batch = self._queue.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if batch is None:
                return
            data = encode(batch)
            self._kept.append((number, data))
            self._publishing.send_multipart((self._topic, number.to_bytes(8, "big"), data))
            number += 1

    def _answer(self) -> None:
        """Send what readers ask for again."""
        socket = self._replaying
        while socket is not None and socket.poll(0):
            *route, first = socket.recv_multipart()
            if not route or len(first) != 8:
                continue
            for number, data in self._kept:
                if number >= int.from_bytes(first, "big"):
                    socket.send_multipart((*route, number.to_bytes(8, "big"), data))
            socket.send_multipart((*route, _END, b""))


def endpoint_of(endpoint: str, dp_rank: int) -> str:
    """Return a rank's own endpoint: with its number added to the port, or to the name."""
    if endpoint.startswith(("inproc://", "ipc://")):
        return f"{endpoint}_dp{dp_rank}"
    base, _, port = endpoint.rpartition(":")
    if not port.isdigit():
        raise InvalidConfig(f"kv_events_config: endpoint {endpoint!r} has no port, such as in 'tcp://*:5557'")
    return endpoint if port == "0" else f"{base}:{int(port) + dp_rank}"


def _open(socket: zmq.Socket[bytes], setting: str, endpoint: str) -> str:
    """Bind a socket, or connect it if the endpoint names a host. Returns where it is bound."""
    is_bound = "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")
    if setting == "endpoint" and not is_bound:
        socket.connect(endpoint)
        return endpoint
    deadline_s = time.monotonic() + _BIND_S
    while True:
        try:
            socket.bind(endpoint)
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE or time.monotonic() > deadline_s:
                raise InvalidConfig(f"kv_events_config: {setting} {endpoint!r} can't be bound: {error}") from error
            time.sleep(0.1)
