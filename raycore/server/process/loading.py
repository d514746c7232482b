"""What a server answers while its model loads: status 503 with how far that is, on every path."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress

import msgspec
from starlette.types import Receive, Scope, Send

from raycore.cluster.engine_start import EngineStart
from raycore.server.http.error_bodies import error_body
from raycore.server.http.errors import APIError
from raycore.server.http.request_ids import RequestIds
from raycore.server.http.streaming import JSON
from raycore.server.http_options import HttpOptions
from raycore.server.listen_options import ListenOptions
from raycore.server.middleware.added import admitting_pages
from raycore.server.process.listening import listen
from raycore.server.process.serving import HttpServer

_LONGEST_RETRY_S = 30
_BODY_S = 2.0
"""Seconds in which a request's body is read. If the connection were closed before, the client would be reset."""


class LoadingApp:
    """An ASGI application for the time in which there is no engine yet."""

    def __init__(self, start: EngineStart, root_path: str) -> None:
        self._start = start
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Refuse the rest: uvicorn goes on without its lifespan."""
        if scope["type"] != "http":
            raise NotImplementedError(scope["type"])
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(_read(receive), _BODY_S)
        view = self._start.view()
        text = f"this server can't answer yet, because its model is loading: {view}"
        error = APIError(503, text, code="model_loading", kind="service_unavailable_error")
        # a load of minutes needs no request each second
        retry_s = min(max(1, round(view.elapsed_s)), _LONGEST_RETRY_S)
        # the next request has to reach the server that follows this one
        headers = {"retry-after": str(retry_s), "connection": "close"}
        body = error_body(error, {**scope, "root_path": self._root_path})
        await JSON({**body, "loading": view.as_dict()}, 503, headers)(scope, receive, send)


async def _read(receive: Receive) -> None:
    while (await receive()).get("more_body", False):
        pass


class LoadingServer:
    """Answers at a server's address until the server itself does."""

    def __init__(self, server: HttpServer) -> None:
        self._server: HttpServer | None = server

    def stop(self) -> None:
        """Stop accepting connections. Those that come to the same socket wait for who accepts them next. Idempotent."""
        if self._server is not None:
            self._server.stop()
            self._server = None


@contextmanager
def answering_while_loading(
    start: EngineStart, listener: socket.socket, address: ListenOptions, *, is_shared: bool, http: HttpOptions
) -> Generator[LoadingServer, None, None]:
    """Have every request answered with how far `start` is, until the block ends, or until `stop()`.

    Args:
        listener: the server's socket, from `listening`.
        is_shared: what `listening` was given.
        http: which web pages may read the answers, and the path that a proxy adds.
    """
    if is_shared and address.uds is None:  # that socket doesn't listen
        host, port = listener.getsockname()[:2]
        own = listen(host, port, is_shared=True)
    else:
        own = listener.dup()
    # whoever waits for its line that the application has started means the server that follows
    quiet = address.uvicorn_log_level if address.uvicorn_log_level in ("critical", "error") else "warning"
    address = msgspec.structs.replace(address, uvicorn_log_level=quiet)
    app = RequestIds(admitting_pages(LoadingApp(start, http.root_path), http), returns=True)
    server = HttpServer(app, own, address)
    server.start()
    loading = LoadingServer(server)
    try:
        yield loading
    finally:
        loading.stop()
