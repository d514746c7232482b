"""What workers say to each other when one reads the other's blocks: messages over a stream socket, with deadlines.

The reader begins with `Hello`, and the owner answers with `Welcome`. Then the reader sends a `Read` at a time, and the
owner answers with as many `Blocks` as it takes, in the order of the digests. The blocks' bytes go into memory that
both map, if both are on one machine. Otherwise they follow the message.
"""

from __future__ import annotations

import struct
from typing import Any, TypeVar

import msgspec

from raycore.system import socket, time

MAX_MESSAGE_BYTES = 1 << 20
MAX_HELLO_BYTES = 4096
"""Whoever hasn't shown the token may not send more."""
MISSING = -1
"""Instead of a checksum: the owner doesn't have the block, or no longer."""

_LENGTH = struct.Struct("<I")
_M = TypeVar("_M", bound=msgspec.Struct)


class PeerAddress(msgspec.Struct, frozen=True):
    """How other workers reach a worker."""

    machine: str
    """Names the machine since its start. Only processes on it can use `local_name`."""
    local_name: str
    """The name of a socket in Linux's abstract namespace, without its zero byte. Empty: there is none."""
    host: str
    port: int
    """0: the worker can only be reached on its machine."""
    token: bytes
    """Proves to the worker that the reader may read, and that the worker is the one that the reader means."""
    layout: str
    """The worker's `BlockStore.layout`."""


class Hello(msgspec.Struct, array_like=True):
    """The reader's first message. If `memory_bytes` isn't 0, the descriptor of memory of that size comes with it."""

    token: bytes
    layout: str
    memory_bytes: int = 0


class Welcome(msgspec.Struct, array_like=True):
    """The owner's answer."""

    refused: str = ""
    """Why the reader can't read. Empty: it can."""


class Read(msgspec.Struct, array_like=True):
    """What the reader wants: blocks that fit together into the memory."""

    digests: list[bytes] = []
    lease: str = ""
    """The name of the blocks' lease. It ends when it is released, or with the connection."""
    released: list[str] = []
    """The names of leases that the reader needs no more. No answer follows if there are no digests."""


class Blocks(msgspec.Struct, array_like=True):
    """The next blocks of a `Read`."""

    checksums: list[int]
    """For each: its checksum, or `MISSING`. Over the network, the bytes of those that aren't missing follow."""


class Broken(Exception):
    """The connection can't be used any more: it ended, was too slow, or brought nonsense."""


def send(connection: socket.socket, message: msgspec.Struct, deadline_s: float, payload: Any = b"") -> None:
    """Send a message, and the bytes that follow it.

    Raises:
        Broken: it couldn't be sent before `deadline_s`, a time of `time.monotonic()`.
    """
    try:
        for part in (framed(message), payload):
            if len(part):
                connection.settimeout(_left(deadline_s))
                connection.sendall(part)
    except OSError as error:
        raise Broken(f"can't send: {error}") from error


def framed(message: msgspec.Struct) -> bytes:
    """A message as it is sent."""
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def receive(connection: socket.socket, kind: type[_M], deadline_s: float, max_bytes: int = MAX_MESSAGE_BYTES) -> _M:
    """Receive a message.

    Raises:
        Broken: it didn't arrive before `deadline_s`, or isn't what it should be.
    """
    length = bytearray(_LENGTH.size)
    receive_into(connection, memoryview(length), deadline_s)
    return receive_rest(connection, kind, bytes(length), deadline_s, max_bytes)


def receive_rest(
    connection: socket.socket, kind: type[_M], length: bytes, deadline_s: float, max_bytes: int = MAX_MESSAGE_BYTES
) -> _M:
    """Receive a message whose first four bytes were received before. Raises as `receive` does."""
    (num_bytes,) = _LENGTH.unpack(length)
    if num_bytes > max_bytes:
        raise Broken(f"a message has {num_bytes} bytes, more than {max_bytes}")
    data = bytearray(num_bytes)
    receive_into(connection, memoryview(data), deadline_s)
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise Broken(f"not a {kind.__name__}: {error}") from error


def receive_into(connection: socket.socket, out: memoryview, deadline_s: float) -> None:
    """Receive exactly as many bytes as `out` has. Raises as `receive` does."""
    num_received = 0
    try:
        while num_received < len(out):
            connection.settimeout(_left(deadline_s))
            count = connection.recv_into(out[num_received:])
            if not count:
                raise Broken("the other side has closed the connection")
            num_received += count
    except OSError as error:
        raise Broken(f"can't receive: {error}") from error


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise Broken("the deadline has passed")
    return left_s
