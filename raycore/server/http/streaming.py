"""Server-sent events, and cancellation of requests whose clients disconnect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from raycore.server.http.error_bodies import error_body
from raycore.server.http.json_text import to_json
from raycore.server.http.request_ids import request_id_of, told_error

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLIENT_CLOSED_REQUEST = 499
"""Status of a request whose client disconnected before the response. It appears only in metrics and traces."""


_PAUSE = object()
"""Stands for an event that is late."""


class JSON(Response):
    """A response whose body is a plain value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


class ClientLeft(Exception):
    """The client closed the connection before the response was complete."""


async def unless_client_leaves(request: Request, answer: Awaitable[T]) -> T:
    """Await `answer` and return its result. If the client closes the connection first, cancel `answer`.

    Raises:
        ClientLeft: the client closed the connection.
    """
    work = asyncio.ensure_future(answer)
    left = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait((work, left), return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            return await work
        raise ClientLeft
    finally:
        left.cancel()
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


class EventStream(Response):
    """Sends events as they arrive. If the client disconnects, closes `events` at once.

    Status 200 is sent only when the first event arrives. So an error before that event is sent with its own status.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[Any, None], *, has_names: bool = False, keep_alive_s: float = 0.0
    ) -> None:
        """
        Args:
            keep_alive_s: after so many seconds without an event, a comment is sent, before the first event, too. 0:
                never. `Context.stream` gives the server's option.
            events: yields plain values, which become the data of one event each.
            has_names: whether each event is sent with a name, that of its field `type`. If not, `[DONE]` follows the
                last event.
        """
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = _with_pauses(events, keep_alive_s) if keep_alive_s else events
        self._has_names = has_names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(scope, send))
        left = asyncio.ensure_future(_disconnect(receive))
        try:
            await asyncio.wait((sending, left), return_when=asyncio.FIRST_COMPLETED)
        finally:
            left.cancel()
            sending.cancel()
            try:
                with suppress(asyncio.CancelledError, ClientLeft):
                    await sending
            finally:
                await self._events.aclose()

    async def _send(self, scope: Scope, send: Send) -> None:
        first = await anext(self._events, None)
        await _sent(send, {"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            if first is not None:
                await _sent(send, self._part(first))
            async for event in self._events:
                part = self._part(event)
                try:  # not `_sent()`: a coroutine around this one would cost each token more than its JSON does
                    await send(part)
                except OSError as error:
                    raise ClientLeft from error
        except ClientLeft:
            raise
        except Exception as error:
            # the status has already been sent, so the error is sent as an event
            told = told_error(error, scope)
            log = logger.exception if told.status == 500 and told is not error else logger.warning
            log("a stream failed, request %s: %s", request_id_of(scope), error)
            await _sent(send, self._part(error_body(told, scope)))
        if not self._has_names:
            await _sent(send, {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": True})
        await _sent(send, {"type": "http.response.body", "body": b"", "more_body": False})

    def _part(self, event: Any) -> Message:
        if event is _PAUSE:
            data = b": keep-alive\n\n"
        elif self._has_names:
            name: str = event.get("type", "error")  # OpenAI's errors have no type
            data = b"event: %b\ndata: %b\n\n" % (name.encode(), to_json(event))
        else:
            data = b"data: %b\n\n" % to_json(event)
        return {"type": "http.response.body", "body": data, "more_body": True}


async def _sent(send: Send, message: Message) -> None:
    try:
        await send(message)
    except OSError as error:
        raise ClientLeft from error


async def _with_pauses(events: AsyncGenerator[Any, None], interval_s: float) -> AsyncGenerator[Any, None]:
    """Yield the events, and `_PAUSE` whenever there was none for so long. Closes `events` when it is closed."""
    upcoming: asyncio.Future[Any] | None = None
    try:
        while True:
            upcoming = upcoming or asyncio.ensure_future(anext(events, _PAUSE))
            done, _ = await asyncio.wait((upcoming,), timeout=interval_s)
            if not done:
                yield _PAUSE
                continue
            event, upcoming = upcoming.result(), None
            if event is _PAUSE:  # they have ended
                return
            yield event
    finally:
        if upcoming is not None:
            upcoming.cancel()
            with suppress(asyncio.CancelledError):
                await upcoming
        await events.aclose()


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
