"""Serves an engine over HTTP until a signal arrives or the engine ends."""

from __future__ import annotations

import errno
import gc
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import uvicorn
from fastapi import FastAPI

from raycore.errors import InvalidConfig
from raycore.node.ports import joined

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.25
_KEEP_ALIVE_S = 5
_BACKLOG = 4096
_START_TIMEOUT_S = 30.0
_GARBAGE_THRESHOLDS = 50_000, 10, 10
_ADVICE = {
    errno.EADDRINUSE: "another program uses this port: give another --port, or 0 for a free one",
    errno.EACCES: "this user may not use this port, as often those below 1024: give another --port",
    errno.EADDRNOTAVAIL: "no interface of this machine has this address: give one that it has, or 0.0.0.0 for all",
}
"""By the reason why an address can't be bound."""

GOODBYE_S = 5
"""Seconds that finished responses have to reach their clients."""


def prepare_process() -> None:
    """Tune this process for many concurrent streams. For processes that only serve.

    Each token creates short-lived objects that reference counting frees. With Python's default thresholds, they would
    trigger the garbage collector many times in each step of a few hundred streams. That took a fifth of the process's
    time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GARBAGE_THRESHOLDS)
    # each connection needs a file descriptor, and many systems allow only 1,024 by default
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Open a listening socket. Call this before the engine starts, so that a port that is in use is reported at once.

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
    with listen(host, port) as probe:  # because a shared bind also succeeds on a port that another program shares
        host, port = probe.getsockname()[:2]
    return _bind(host, port, is_shared=True)


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


class Server(Protocol):
    """Serves an engine over HTTP, in this process or in others."""

    def start(self) -> None:
        """Start to serve. Returns once requests are served."""
        ...

    def check(self) -> None:
        """Raise an error if the server has ended without `stop()`."""
        ...

    def stop(self) -> None:
        """Stop accepting connections, and wait up to 10 s for responses in progress."""
        ...


class HttpServer:
    """Serves an application over HTTP, on a thread of its own. The main thread keeps handling signals."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app, log_level="warning", timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=GOODBYE_S
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="raycore-http", daemon=True)

    def start(self) -> None:
        """Start to serve. Returns once requests are served."""
        self._thread.start()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise RuntimeError(f"the HTTP server didn't start within {_START_TIMEOUT_S:g} s; see the log")
            time.sleep(0.01)

    def check(self) -> None:
        """Raise an error if the server has ended without `stop()`."""
        if not self._thread.is_alive():
            raise RuntimeError("the HTTP server ended unexpectedly; see the log")

    def stop(self) -> None:
        """Stop accepting connections, and wait up to 10 s for responses in progress. Idempotent."""
        self._server.should_exit = True
        self._thread.join(2 * GOODBYE_S)

    def _serve(self, listener: socket.socket) -> None:
        self._server.run([listener])


def serve(
    engine: AsyncLLM, server: Server, shutdown_timeout_s: float, on_serving: Callable[[], object] = lambda: None
) -> str | None:
    """Serve until SIGTERM, SIGINT or SIGHUP. Unfinished requests then have `shutdown_timeout_s` seconds to finish.

    Call this on the main thread. `on_serving` is called once requests are served.

    Returns: the signal's name; None if the engine was shut down without a signal.

    Raises:
        EngineDeadError: the engine failed.
    """
    with engine.draining_on_signals(shutdown_timeout_s) as came:
        try:
            server.start()
            on_serving()
            while not came and not engine.wait_for_completion_or_failure(_POLL_INTERVAL_S):
                server.check()
            # new requests are refused now; wait until the unfinished ones have finished or were aborted
            while not engine.clients.drain(_POLL_INTERVAL_S):
                pass
        finally:
            server.stop()
    return signal.Signals(came[0]).name if came else None
