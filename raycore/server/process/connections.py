"""The connections of a server: what a client can hold, or have read, before anything asks for its key.

uvicorn's protocol reads requests. Here are bounds on what it reads and on how long it waits. Each refusal is an error
response, if one can still be sent, and the end of the connection.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from raycore.server.http.errors import APIError
from raycore.server.http.json_text import to_json
from raycore.server.http.streaming import JSON
from raycore.server.listen_options import ListenOptions

logger = logging.getLogger(__name__)

_MAX_PIPELINED = 16
"""Maximum number of requests that wait for the responses of those before them on a connection."""
_GOODBYE_S = 1.0
"""Seconds that a client has to read why its connection ends. Closed at once, it would be reset."""
_MAX_LEAVING = 256
"""Maximum number of connections, above the limit, that are told why they end."""
_WARN_S = 60.0
_LAST_REQUEST_S = 0.5
"""Seconds that a new connection has to send its request when the server ends."""
_UNREAD_S = 60.0
"""Seconds after which a client that reads nothing of a response, though more is waiting, is gone."""
_LINES = {
    400: b"HTTP/1.1 400 Bad Request",
    408: b"HTTP/1.1 408 Request Timeout",
    431: b"HTTP/1.1 431 Request Header Fields Too Large",
    503: b"HTTP/1.1 503 Service Unavailable",
}


def connection_class(options: ListenOptions, max_connections: int) -> type[HttpConnection]:
    """The class of a server's connections."""
    return type(
        "Connection", (HttpConnection,), {"options": options, "max_connections": max_connections, "warned_s": -math.inf}
    )


class HttpConnection(HttpToolsProtocol):
    """A connection. Its callbacks run on the event loop: uvicorn's transport and httptools' parser call them.

    One deadline holds whenever no response is due: for the headers of the first request or of a further one, and for
    the rest of a body whose request was refused.
    """

    options: ClassVar[ListenOptions]
    max_connections: ClassVar[int]
    warned_s: ClassVar[float]
    """When it was logged last that there are so many, in the loop's time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_around = 0
        """Bytes of the current request around its body so far: its line and headers, trailers, and the frames of
        chunks."""
        self._most_around = self.options.h11_max_incomplete_event_size
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._why: APIError | None = None
        """Why a callback of the parser has raised an error."""
        self._is_over = False
        """Nothing more is read."""

    # ---- what the transport calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        num_others = len(self.connections) - 1
        if num_others >= self.max_connections + _MAX_LEAVING:
            transport.abort()
        elif num_others >= self.max_connections:
            self._warn(num_others)
            told = f"this server is at its limit ({num_others} connections): try again later"
            self._refuse(APIError(503, told, code="too_many_connections", kind="service_unavailable_error"))
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._stop_watching()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        most = self.options.h11_max_incomplete_event_size
        for start in range(0, len(data), most):  # a part, at most, is parsed in vain
            self._read(data[start : start + most])

    def _read(self, data: bytes) -> None:
        if self._is_over:
            return
        self._unset_keepalive_if_required()
        self._num_around += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(self._why or APIError(400, f"this isn't a request of HTTP/1.1: {error}"))
        if self._num_around > self._most_around and not self._is_over:
            self._refuse(self._too_long())
        if not self._is_over and not self._is_response_due:
            self._start_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        self._stop_watching()
        super().resume_writing()

    def shutdown(self) -> None:
        """End the connection, after the response if one is due. uvicorn calls it when the server ends."""
        if self.cycle is None:  # pyright: ignore[reportUnnecessaryComparison]
            # its request may be under way: the client would see a reset, and not know whether it had an effect
            self.loop.call_later(_LAST_REQUEST_S, super().shutdown)
        else:
            super().shutdown()

    # ---- what the parser calls

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("too many requests wait")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        most = self.options.h11_max_header_count
        if len(self.headers) > most:
            self._why = APIError(431, f"the request has more than {most} headers", code="too_many_headers")
        elif self._num_around > self._most_around:  # of these bytes, some may be the body's
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            self._why = self._too_long() if size > self._most_around else None
        if self._why is not None:
            raise ValueError(self._why.message)
        super().on_headers_complete()
        self.headers = []  # for trailers, which must not count as headers: the application has the other list
        self._stop_deadline()
        if self.scope["http_version"] == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # pyright: ignore[reportAttributeAccessIssue]

    def on_body(self, body: bytes) -> None:
        self._num_around -= len(body)
        if not self.cycle.response_complete:
            self._most_around += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # see `_ignore_upgrade`: the body may still come
        self._num_around, self._most_around = 0, self.options.h11_max_incomplete_event_size
        super().on_message_complete()

    # ---- what responses call

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    # ---- the ends

    def _warn(self, num_others: int) -> None:
        kind = type(self)
        if self.loop.time() > kind.warned_s + _WARN_S:
            kind.warned_s = self.loop.time()
            logger.warning("%d connections are open, and further ones are refused (max_connections)", num_others)

    @property
    def _is_response_due(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete  # pyright: ignore[reportUnnecessaryComparison]

    def _too_long(self) -> APIError:
        most = self.options.h11_max_incomplete_event_size
        return APIError(
            431,
            f"the request's line, headers and frames of chunks have more than {most} bytes",
            code="headers_too_large",
        )

    def _refuse(self, error: APIError) -> None:
        """Read nothing more, and end the connection: with an error, or after the responses that are due."""
        self._is_over = True
        self._stop_deadline()
        logger.debug("%s ends: %s", self.client, error.message)
        if self._is_response_due and not self.cycle.more_body:
            self.cycle.keep_alive = False  # the newest request is whole: its response is the last
            return
        if self.pipeline:  # the newest request waits for responses: the error is its own
            self.cycle.keep_alive = False
            answer: Any = JSON(error.body(), error.status)
            self.pipeline[0] = self.cycle, answer
            return
        if not self._is_response_due or not self.cycle.response_started:
            body = to_json(error.body())
            headers = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close" % len(body)
            self.transport.write(_LINES[error.status] + b"\r\n" + headers + b"\r\n\r\n" + body)
        if self._is_response_due:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.pause_reading()
        self.loop.call_later(_GOODBYE_S, self.transport.abort)

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self.options.header_timeout_s, self._end_late)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_late(self) -> None:
        self._deadline = None
        if self._num_around and (self.cycle is None or not self.cycle.more_body):  # pyright: ignore[reportUnnecessaryComparison]
            told = f"the request's headers didn't arrive within {self.options.header_timeout_s:g} s"
            self._refuse(APIError(408, told, code="request_timeout"))
        else:
            self.transport.close()

    def _watch_reader(self, before: int | None = None) -> None:
        """End the connection once its client has read nothing for a while, of at least what is waiting now."""
        self._stop_watching()
        waiting = self.transport.get_write_buffer_size()
        if waiting and waiting == before:
            logger.debug("%s ends: its client has read nothing for %g s", self.client, _UNREAD_S)
            self.transport.abort()
        elif waiting:
            self._unread = self.loop.call_later(_UNREAD_S, self._watch_reader, waiting)

    def _stop_watching(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the body of a request that offers another protocol, as Java's client offers HTTP/2 with its first one.

        A server may answer in HTTP/1.1. But httptools takes what follows the headers for the other protocol. So another
        parser reads the body, behind headers that only say where it ends. The response then ends the connection, and
        nothing is read after the body.
        """
        self.cycle.keep_alive = False
        ends = (b"content-length", b"transfer-encoding")
        headers = b"".join(b"%b: %b\r\n" % each for each in self.scope["headers"] if each[0] in ends)
        self.parser = httptools.HttpRequestParser(_BodyReader(self))
        try:
            self.parser.feed_data(b"POST / HTTP/1.1\r\nconnection: close\r\n" + headers + b"\r\n" + rest)
        except httptools.HttpParserError as error:
            self._refuse(APIError(400, f"the request's body can't be read: {error}"))


class _BodyReader:
    """Hands a body to a connection, whatever the headers before it were."""

    def __init__(self, connection: HttpConnection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete


def _without_chunks(cycle: RequestResponseCycle) -> Callable[[Any], Awaitable[None]]:
    """Sends a response to a client of HTTP/1.0, which knows no chunks: the end of the connection ends the body."""
    send = cycle.send
    ends_with_connection = False

    async def send_without_chunks(message: Any) -> None:
        nonlocal ends_with_connection
        if message["type"] == "http.response.start":
            ends_with_connection = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if ends_with_connection:
                cycle.chunked_encoding = False
        elif ends_with_connection:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    return send_without_chunks
