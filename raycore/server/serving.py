"""Serves an engine over HTTP until a signal comes or the engine ends."""

from __future__ import annotations

import logging
import signal
import socket
import threading
import time

import uvicorn
from fastapi import FastAPI

from raycore.llm import AsyncLLM

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_KEEP_ALIVE_S = 5
_START_TIMEOUT_S = 30.0
_GOODBYE_S = 5
"""For answers that are complete to reach their clients."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, bound before the engine starts, so that a taken port is found out at once.

    Raises:
        OSError: the address can't be had.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except BaseException:
        listener.close()
        raise
    return listener


class HttpServer:
    """An application served on a thread of its own, which leaves signals to the main thread."""

    def __init__(self, app: FastAPI, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app, log_level="warning", timeout_keep_alive=_KEEP_ALIVE_S, timeout_graceful_shutdown=_GOODBYE_S
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._serve, args=(listener,), name="raycore-http", daemon=True)

    def start(self) -> None:
        """Returns once it serves."""
        self._thread.start()
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise RuntimeError(f"the HTTP server didn't start within {_START_TIMEOUT_S:g} s; its log says why")
            time.sleep(0.01)

    def stop(self) -> None:
        """Take no connections any more, and wait for the answers under way. Idempotent."""
        self._server.should_exit = True
        self._thread.join(2 * _GOODBYE_S)

    def _serve(self, listener: socket.socket) -> None:
        self._server.run([listener])


def serve(engine: AsyncLLM, app: FastAPI, listener: socket.socket, shutdown_timeout_s: float) -> str | None:
    """Serve until SIGTERM or SIGINT; then what runs may finish, for `shutdown_timeout_s`. Call it on the main thread.

    Returns: the signal's name; None when the engine was shut down by someone else.

    Raises:
        EngineDeadError: the engine failed.
    """
    server = HttpServer(app, listener)
    with engine.draining_on_signals(shutdown_timeout_s) as came:
        server.start()
        try:
            while not came and not engine.wait_for_completion_or_failure(_LOOK_S):
                pass
            # no request is taken any more; those under way end by themselves, or are aborted
            while engine.num_unfinished_requests:
                time.sleep(_LOOK_S)
        finally:
            server.stop()
    return signal.Signals(came[0]).name if came else None
