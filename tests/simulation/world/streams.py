"""Sockets over which bytes and descriptors go, between processes that may end in the middle of it."""

from __future__ import annotations

import os as real_os
from collections.abc import Callable, Sequence
from typing import Any

from simulation.world import kernel, memory, sockets
from simulation.world.kernel import Process, pause
from simulation.world.sockets import Address, Listener, listen
from simulation.world.threads import world

AF_UNIX, AF_INET = 1, 2
_LEAST_S, _MOST_S = 1e-5, 5e-4
_MAX_PIECES = 3
"""What is sent at once may arrive in so many pieces."""


class _Way:
    """One direction of a connection: what has arrived, and what hasn't been read."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.fds: list[int] = []
        self.is_ended = False
        self._readers: list[kernel.Thread] = []
        self._last_s = 0.0
        """When the last piece that was sent arrives: pieces keep their order."""

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        draws = _draws()
        cuts = sorted(draws.randrange(len(data) + 1) for _ in range(draws.randrange(_MAX_PIECES)))
        for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
            if end > start:
                piece, own = data[start:end], list(fds) if not start else []
                self._later(lambda piece=piece, own=own: self._arrive(piece, own))

    def end(self) -> None:
        """Let the reader see the end, after what was sent before."""
        self._later(self.end_at_once)

    def end_at_once(self) -> None:
        self.is_ended = True
        self._wake()

    def wait(self, timeout_s: float | None) -> None:
        """Wait until something has arrived, or the end. Raises TimeoutError."""
        here, thread = world(), world().current
        assert thread is not None
        until_s = kernel.NEVER if timeout_s is None else here.now_s + timeout_s
        while not (self.data or self.is_ended):
            if here.now_s >= until_s:
                raise TimeoutError("timed out")
            self._readers.append(thread)
            here.park("bytes of a socket", None if until_s == kernel.NEVER else until_s - here.now_s)
            self._readers.remove(thread)

    def take(self, size: int) -> bytes:
        found = bytes(self.data[:size])
        del self.data[:size]
        return found

    def _later(self, event: Callable[[], object]) -> None:
        here = world()
        self._last_s = max(self._last_s, here.now_s + _draws().uniform(_LEAST_S, _MOST_S))
        here.call_later(self._last_s - here.now_s, event)

    def _arrive(self, piece: bytes, fds: list[int]) -> None:
        if not self.is_ended:
            self.data += piece
            self.fds += fds
            self._wake()

    def _wake(self) -> None:
        for thread in self._readers:
            world().unpark(thread)


class _Queue:
    """The connections that a listener hasn't accepted."""

    def __init__(self) -> None:
        self.made: list[Socket] = []
        self.waiting: list[kernel.Thread] = []
        self.is_ended = False

    def wake(self) -> None:
        for thread in self.waiting:
            world().unpark(thread)


class Socket(sockets.Socket):
    """A stream socket: one end of a connection, or a listener."""

    def __init__(self, family: int = AF_INET, type: int = 1, proto: int = 0) -> None:
        super().__init__(family, type, proto)
        self.family = family
        self._process = _process()
        self._in: _Way | None = None
        self._out: _Way | None = None
        self._queue: _Queue | None = None
        self._key: Any = None
        self._other: Socket | None = None
        self._is_accepted = False

    @property
    def is_used(self) -> bool:
        return super().is_used or self._is_accepted or self._key is not None

    @property
    def has_ended(self) -> bool:
        return self._in is not None and self._in.is_ended

    @property
    def listens(self) -> bool:
        """Whether others can connect to it."""
        return self._queue is not None

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def setsockopt(self, *_: Any) -> None:
        """No option makes a difference here."""

    # ---- connecting

    def bind(self, address: Address) -> None:
        assert address.startswith("\0"), f"{address!r} isn't an abstract name"
        self._key = _key(address)

    def listen(self, backlog: int = 0) -> None:
        self._queue = _Queue()
        process, queue = self._process, self._queue
        listener = Listener(lambda: process, lambda: getattr(process.machine, "is_lost", False))
        listener.queue = queue
        listen(world().systems, self._key if self._key is not None else self._address, listener)

    def accept(self) -> tuple[Socket, Any]:
        queue, here = self._queue, world()
        assert queue is not None
        assert here.current is not None
        while not queue.made:
            if queue.is_ended:
                raise OSError(22, "Invalid argument")
            queue.waiting.append(here.current)
            here.park("a connection to accept")
            queue.waiting.remove(here.current)
        return queue.made.pop(0), ""

    def connect(self, address: Address) -> None:
        if isinstance(address, str) and address.startswith("\0"):
            address = _key(address)
        super().connect(address)
        listener = world().systems["listeners"].get(address)
        queue: _Queue | None = None if listener is None else listener.queue
        if queue is not None:
            other = Socket(self.family)
            other._process, other._is_accepted = listener.process(), True
            other._descriptor.process = other._process
            self._in, self._out = other._out, other._in = _Way(), _Way()
            self._other, other._other = other, self
            for one in (self, other):
                one._process.on_end.append(lambda ended, one=one: one._process_ended(ended))
            queue.made.append(other)
            queue.wake()

    def _process_ended(self, process: Process) -> None:
        if not getattr(process.machine, "is_lost", False):
            self._end()

    # ---- bytes

    def sendall(self, data: Any) -> None:
        self._send(bytes(data), ())

    def _send(self, data: bytes, fds: Sequence[int]) -> None:
        assert self._out is not None
        if self._out.is_ended:
            raise BrokenPipeError(32, "Broken pipe")
        self._out.send(data, fds)
        told = world().systems.get("told of bytes")
        if told is not None and self._other is not None:
            told(self._process, self._other._process, len(data))
        pause()

    def recv(self, size: int) -> bytes:
        assert self._in is not None
        pause()
        self._in.wait(self._timeout_s)
        return self._in.take(size)

    def recv_into(self, out: Any) -> int:
        found = self.recv(len(out))
        out[: len(found)] = found
        return len(found)

    # ---- the end

    def shutdown(self, how: int) -> None:
        if self._queue is not None:
            self._queue.is_ended = True
            self._queue.wake()
        self._end()

    def close(self) -> None:
        self._end()
        if self._key is not None:
            world().systems["listeners"].pop(self._key, None)
            self._key = None
        super().close()

    def _end(self) -> None:
        """Let the other end read what was sent, and no more, and send nothing."""
        if self._out is not None and not self._out.is_ended:
            self._out.end()
        if self._in is not None:
            self._in.end_at_once()


def send_fds(socket: Socket, buffers: Sequence[bytes], fds: Sequence[int]) -> None:
    socket._send(b"".join(buffers), [real_os.dup(fd) for fd in fds])


def recv_fds(socket: Socket, size: int, max_fds: int) -> tuple[bytes, list[int], int, Any]:
    data = socket.recv(size)
    assert socket._in is not None
    fds, socket._in.fds = [memory.own(number) for number in socket._in.fds], []
    return data, fds, 0, None


def create_connection(address: Address, timeout: float | None = None, *_: Any) -> Socket:
    made = Socket()
    made.settimeout(timeout)
    try:
        made.connect(address)
    except OSError:
        made.forget()
        raise
    return made


def create_server(address: tuple[str, int], **_: Any) -> Socket:
    made = Socket()
    made.serve(address)
    return made


def _key(name: str) -> Any:
    """An abstract name is known on one machine."""
    return repr(_process().machine), name


def _process() -> Process:
    thread = world().current
    assert thread is not None
    return thread.process


def _draws() -> Any:
    here = world()
    return here.systems.setdefault("bytes of sockets", here.generator("bytes of sockets"))
