"""Opens the sockets on which a server listens, and hands one to other processes."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress

from raycore.errors import InvalidConfig
from raycore.node.ports import joined
from raycore.server.listen_options import ListenOptions

_BACKLOG = 4096
_HAND_OVER_S = 10.0
_ADVICE = {
    errno.EADDRINUSE: "another program uses this port: give another --port, or 0 for a free one",
    errno.EACCES: "this user may not use this port, as often those below 1024: give another --port",
    errno.EADDRNOTAVAIL: "no interface of this machine has this address: give one that it has, or 0.0.0.0 for all",
}
"""By the reason why an address can't be bound."""


@contextmanager
def listening(options: ListenOptions, *, is_shared: bool) -> Generator[socket.socket, None, None]:
    """Yield the socket of a server. Use this before the engine starts, so that a port in use is reported at once.

    With `is_shared`, other processes serve: a TCP socket only reserves its address for them, and gets no connections. A
    Unix domain socket listens, and they get it by `handed_over`.

    Raises:
        InvalidConfig: the address can't be used.
    """
    if options.uds is None:
        with (reserve if is_shared else listen)(options.host, options.port) as listener:
            yield listener
        return
    with listen_unix(options.uds) as listener:
        try:
            yield listener
        finally:
            with suppress(OSError):
                os.unlink(options.uds)


def shown_address(options: ListenOptions, listener: socket.socket) -> str:
    """Where the server is reached: a URL, or the path of its Unix domain socket."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    return f"{'http' if options.ssl_certfile is None else 'https'}://{joined(host, port)}"


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Open a listening socket.

    With `is_shared`, several processes can listen on the same address; the kernel spreads connections over them.

    Raises:
        InvalidConfig: the host isn't one of this machine, or the port can't be used.
    """
    listener = _bind(host, port, is_shared)
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _refusal(host, port, error) from error
    return listener


def reserve(host: str, port: int) -> socket.socket:
    """Reserve an address for processes that will share it.

    Returns: a socket that is bound to the address. It doesn't listen, so it gets no connections.

    Raises:
        InvalidConfig: the host isn't one of this machine, or the port can't be used.
    """
    if port != 0:
        listen(host, port).close()  # because a shared bind also succeeds on a port that another program shares
    return _bind(host, port, is_shared=True)


def listen_unix(path: str) -> socket.socket:
    """Open a listening Unix domain socket. Replaces one that a program has left behind.

    Raises:
        InvalidConfig: another program listens there, or the path can't be used.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_stale(path)
        listener.bind(path)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        advice = " (make its directory first)" if isinstance(error, FileNotFoundError) else ""
        raise InvalidConfig(f"can't listen on uds={path!r}: {error.strerror or error}{advice}") from error
    except InvalidConfig:
        listener.close()
        raise
    return listener


def _remove_stale(path: str) -> None:
    try:
        is_socket = stat.S_ISSOCK(os.stat(path).st_mode)
    except FileNotFoundError:
        return
    if not is_socket:
        raise InvalidConfig(f"can't listen on uds={path!r}: something else than a socket is there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise InvalidConfig(f"can't listen on uds={path!r}: another program uses it")


@contextmanager
def handed_over(listener: socket.socket) -> Generator[str, None, None]:
    """While the block runs, other processes of this user get the socket by `take_over` of the path that is yielded."""
    with tempfile.TemporaryDirectory(prefix="raycore-socket-") as directory:  # only this user can enter it
        path = os.path.join(directory, "socket")
        with listen_unix(path) as giver:
            thread = threading.Thread(target=_give, args=(giver, listener), name="raycore-socket", daemon=True)
            thread.start()
            try:
                yield path
            finally:
                giver.shutdown(socket.SHUT_RDWR)  # ends accept()
                thread.join(_HAND_OVER_S)


def take_over(path: str) -> socket.socket:
    """The listening socket that another process hands over at `path`. Raises OSError if that has ended."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_HAND_OVER_S)
        connection.connect(path)
        _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    if not descriptors:
        raise ConnectionError(f"no socket was handed over at {path}")
    return socket.socket(fileno=descriptors[0])


def _give(giver: socket.socket, listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = giver.accept()
        except OSError:  # it was shut down
            return
        with connection, suppress(OSError):
            connection.settimeout(_HAND_OVER_S)
            socket.send_fds(connection, [b"x"], [listener.fileno()])


def _bind(host: str, port: int, is_shared: bool) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise _refusal(host, port, error) from error
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise _refusal(host, port, error) from error
    return bound


def _refusal(host: str, port: int, error: OSError | UnicodeError) -> InvalidConfig:
    if isinstance(error, (socket.gaierror, UnicodeError)):
        advice = "the host can't be resolved: give the name or address of an interface of this machine"
    else:
        advice = _ADVICE.get(error.errno or 0, "")
    reason = error.strerror if isinstance(error, OSError) else None
    return InvalidConfig(f"can't listen on {joined(host, port)}: {reason or error}{advice and f' ({advice})'}")
