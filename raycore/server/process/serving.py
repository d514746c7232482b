"""Serves an engine over HTTP until a signal arrives or the engine ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from raycore.server.listen_options import ListenOptions
from raycore.server.process.connection_log import WithoutPaths
from raycore.server.process.connections import connection_class
from raycore.server.process.tls import CertificateWatch

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.25
_KEEP_ALIVE_S = 5
_START_TIMEOUT_S = 30.0
_GARBAGE_THRESHOLDS = 50_000, 10, 10

_HANDSHAKE_S = 10.0
_OTHER_FILES = 384
"""Open files of a process beside its connections: Ray's, the model's, and connections that are being refused."""

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

    def __init__(self, app: ASGIApp, listener: socket.socket, options: ListenOptions | None = None) -> None:
        options = ListenOptions() if options is None else options
        self._server = _Server(_config(app, options))
        self._options = options
        self._certificates: CertificateWatch | None = None
        self._filter = WithoutPaths(options.disable_access_log_for_endpoints)
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="raycore-http", daemon=True)

    def start(self) -> None:
        """Start to serve. Returns once requests are served."""
        self._thread.start()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise RuntimeError(f"the HTTP server didn't start within {_START_TIMEOUT_S:g} s; see the log")
            time.sleep(0.01)
        if self._options.enable_ssl_refresh:
            assert self._server.config.ssl is not None
            self._certificates = CertificateWatch(self._server.config.ssl, self._options)
            self._certificates.start()

    def check(self) -> None:
        """Raise an error if the server has ended without `stop()`."""
        if not self._thread.is_alive():
            raise RuntimeError("the HTTP server ended unexpectedly; see the log")

    def stop(self) -> None:
        """Stop accepting connections, and wait up to 10 s for responses in progress. Idempotent."""
        self._server.should_exit = True
        if self._certificates is not None:
            self._certificates.stop()
        self._thread.join(2 * GOODBYE_S)

    def _serve(self, listener: socket.socket) -> None:
        log = logging.getLogger("uvicorn.access")
        log.addFilter(self._filter)
        try:
            self._server.run([listener])
        finally:
            log.removeFilter(self._filter)


class _Server(uvicorn.Server):
    """uvicorn's server, with a deadline for TLS handshakes of less than asyncio's minute."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self.config.is_ssl:
            loop: Any = asyncio.get_running_loop()
            loop.create_server = partial(loop.create_server, ssl_handshake_timeout=_HANDSHAKE_S)
        await super().startup(sockets)


def _max_connections(options: ListenOptions) -> int:
    """How many connections the open files of this process are enough for."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(options.max_connections, max(allowed - _OTHER_FILES, allowed // 4))


def _config(app: ASGIApp, options: ListenOptions) -> uvicorn.Config:
    chosen: dict[str, Any] = {}
    if options.ssl_ciphers is not None:
        chosen["ssl_ciphers"] = options.ssl_ciphers
    if options.log_config_file is not None:
        chosen["log_config"] = None  # logging is configured already
    return uvicorn.Config(
        app,
        http=connection_class(options, _max_connections(options)),
        ws="none",  # no endpoint has them
        log_level=options.uvicorn_log_level,
        access_log=not options.disable_uvicorn_access_log,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=GOODBYE_S,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_ca_certs=options.ssl_ca_certs,
        ssl_cert_reqs=options.ssl_cert_reqs,
        **chosen,
    )


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
