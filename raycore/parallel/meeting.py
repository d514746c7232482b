"""How workers that compute a model together meet, and hear from each other until they leave.

Each worker has a connection to the one of rank 0, the leader. Whatever a worker tells, a thread of the leader passes on
to all. So when a worker fails, or its connection ends, all others hear of it, and stop waiting. The leader's process
listens before anyone knows the address: if nobody listens there, the leader is gone.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from raycore.node.listeners import claim
from raycore.node.ports import parse_address

GRACE_S = 1.0
"""How long, in seconds, a worker that hears of a failure waits before it raises, so that the failure itself is reported
first. Usually the executor has ended this worker by then."""
_SEND_TIMEOUT_S = 10.0
"""How long, in seconds, a worker may take to read what the leader passes on."""
_IDLE_S = 0.05
_MAX_CAUSE = 2000
_MAX_UNREAD = 1 << 20
"""Bytes of an unfinished message, which only a stranger sends."""


class PeerFailed(ConnectionError):
    """Another worker has failed, or is gone. The message says which one, and why."""


class _Here(msgspec.Struct, tag="here"):
    rank: int
    name: str


class _Note(msgspec.Struct, tag="note"):
    key: str
    value: str


class _Failed(msgspec.Struct, tag="failed"):
    """`what`: which worker failed, and why."""

    what: str


class _Left(msgspec.Struct, tag="left"):
    """A worker doesn't need the others any more. If it is the leader, the meeting is over."""

    rank: int


_Message = _Here | _Note | _Failed | _Left
_decode = msgspec.json.Decoder(_Message).decode


def _encode(message: _Message) -> bytes:
    return msgspec.json.encode(message) + b"\n"


class Meeting:
    """One worker's part in a meeting. Any thread may call its methods."""

    def __init__(self, address: str, rank: int, size: int, timeout_s: float, name: str | None = None) -> None:
        """Connect to the leader at `address`, `tcp://host:port`, which the leader's process has offered.

        Args:
            timeout_s: how long this worker waits for the others, each time, in seconds.
            name: what the others call this worker when it fails.

        Raises:
            PeerFailed: the leader can't be reached.
        """
        self._address = address
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._name = name or f"worker {rank}"
        self._changed = threading.Condition()
        self._here: set[int] = set()
        self._notes: dict[str, str] = {}
        self._failure: str | None = None
        self._heard_s = 0.0
        """When the failure was heard of."""
        self._is_over = False
        if rank == 0:
            _Leader(claim(address))
        try:
            self._connection = socket.create_connection(parse_address(address.removeprefix("tcp://")), timeout_s)
        except OSError as error:
            raise PeerFailed(
                f"the worker that the others meet at {address} is gone, or out of reach: {error}"
            ) from error
        self._connection.settimeout(None)
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host = str(self._connection.getsockname()[0])
        """The address of this worker's machine, as the leader sees it."""
        threading.Thread(target=self._hear_all, name="raycore-meeting", daemon=True).start()
        self._tell(_Here(rank, self._name))

    def set(self, key: str, value: str) -> None:
        """Tell all workers a value."""
        self._tell(_Note(key, value))

    def get(self, key: str) -> bytes:
        """Wait for a value that a worker tells.

        Raises:
            TimeoutError: none has told it in time. The message names workers that haven't come.
            PeerFailed: a worker has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: key in self._notes or self._failure is not None, self._timeout_s)
            if key in self._notes:
                return self._notes[key].encode()
        self.check()
        late = sorted(set(range(self._size)) - self._here)
        who = f"workers {late} of the {self._size} didn't come" if late else f"no worker told {key!r}"
        raise TimeoutError(
            f"{who} within {self._timeout_s:g} s to the meeting at {self._address}: stuck, or unable to reach it"
        )

    def check(self) -> None:
        """Raise PeerFailed if a worker has failed, `GRACE_S` after this one has heard of it."""
        if self._failure is not None:
            time.sleep(max(0.0, self._heard_s + GRACE_S - time.monotonic()))
            raise PeerFailed(self._failure)

    def fail(self, cause: str) -> None:
        """Tell all workers, also those that come later, that this one has failed. They stop waiting."""
        sendable = cause[:_MAX_CAUSE].encode(errors="replace").decode()  # names of files may be no UTF-8
        with suppress(PeerFailed):  # they know already
            self._tell(_Failed(f"{self._name} failed: {sendable}"))

    def leave(self) -> None:
        """Disconnect. The end of this process is no failure any more. Idempotent."""
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
        with suppress(OSError):
            self._connection.sendall(_encode(_Left(self._rank)))
            self._connection.shutdown(socket.SHUT_WR)  # the thread closes it at its end

    def _tell(self, message: _Message) -> None:
        try:
            self._connection.sendall(_encode(message))
        except OSError as error:
            self._note_failure(f"the worker that leads at {self._address} is gone: {error}")
            self.check()

    def _hear_all(self) -> None:
        """Hear what others tell, until the end of the connection. Runs on a thread of its own."""
        cause = "its process has ended"
        try:
            with self._connection, self._connection.makefile("rb") as lines:
                for line in lines:
                    self._hear(_decode(line))
        except (OSError, msgspec.DecodeError) as error:
            cause = str(error)
        self._note_failure(f"the worker that leads at {self._address} is gone: {cause}")

    def _hear(self, message: _Message) -> None:
        if isinstance(message, _Failed):
            self._note_failure(message.what)
            return
        with self._changed:
            if isinstance(message, _Here):
                self._here.add(message.rank)
            elif isinstance(message, _Note):
                self._notes[message.key] = message.value
            else:
                self._is_over |= message.rank == 0
            self._changed.notify_all()

    def _note_failure(self, what: str) -> None:
        with self._changed:
            if self._failure is None and not self._is_over:
                self._heard_s = time.monotonic()
                self._failure = what
            self._changed.notify_all()


class _Leader:
    """The thread that passes on what each worker tells, to those that come later, too. It ends when all have gone."""

    def __init__(self, listener: socket.socket) -> None:
        self._told = bytearray()
        self._unread: dict[socket.socket, bytearray] = {}
        """What each connection has sent of a message that isn't complete."""
        self._members: dict[socket.socket, _Here] = {}
        """The workers that are here, and haven't left or failed."""
        self._selector = selectors.DefaultSelector()
        self._listener: socket.socket | None = listener
        self._selector.register(listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="raycore-meeting-leader", daemon=True).start()

    def _run(self) -> None:
        with self._selector:
            while self._unread or self._listener is not None:
                for key, _ in self._selector.select():
                    ready = key.fileobj
                    assert isinstance(ready, socket.socket)
                    if ready is self._listener:
                        self._welcome(ready)
                    elif ready in self._unread:  # else it was dropped in this round
                        self._read(ready)

    def _welcome(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:
            time.sleep(_IDLE_S)  # too many files are open, for example
            return
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._unread[connection] = bytearray()
        self._selector.register(connection, selectors.EVENT_READ)
        self._send(connection, bytes(self._told))

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        unread = self._unread[connection]
        *lines, rest = (unread + data).split(b"\n")
        unread[:] = rest
        try:
            self._take(connection, [_decode(line) for line in lines])
        except (ValueError, RecursionError):  # a stranger
            data = b""
        if not data or len(unread) > _MAX_UNREAD:
            self._drop(connection)

    def _take(self, connection: socket.socket, messages: Iterable[_Message]) -> None:
        for message in messages:
            if isinstance(message, _Here):
                self._members[connection] = message
            elif not isinstance(message, _Note):
                self._members.pop(connection, None)
            self._pass_on(message)
            if isinstance(message, _Left) and message.rank == 0:
                self._end()

    def _pass_on(self, message: _Message) -> None:
        line = _encode(message)
        self._told += line
        for connection in list(self._unread):
            self._send(connection, line)

    def _send(self, connection: socket.socket, data: bytes) -> None:
        try:
            connection.sendall(data)
        except OSError:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        """Close a connection. A worker that hasn't left is gone."""
        if self._unread.pop(connection, None) is None:
            return
        self._selector.unregister(connection)
        connection.close()
        member = self._members.pop(connection, None)
        if member is not None:
            self._pass_on(_Failed(f"{member.name} is gone: its process has ended"))

    def _end(self) -> None:
        """Let nobody else in. The others close their connections when they see the end of what is sent."""
        if self._listener is not None:
            self._selector.unregister(self._listener)
            self._listener.close()
            self._listener = None
        self._members.clear()
        for connection in list(self._unread):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
