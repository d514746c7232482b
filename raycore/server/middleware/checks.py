"""What happens around every request: checks of its key, body, headers and number, and a note of ignored fields."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.server.contract.service import Service
from raycore.server.endpoints import Rule, path_of, paths_with
from raycore.server.http.error_bodies import error_body
from raycore.server.http.errors import APIError
from raycore.server.http.ignored_fields import HEADER, log_ignored, noting
from raycore.server.http.request_ids import add_headers
from raycore.server.http.streaming import CLIENT_CLOSED_REQUEST, JSON
from raycore.server.middleware.body_encodings import as_json, too_large
from raycore.server.options import ServerOptions

_BLANKS = " \t"
"""White space that HTTP allows around a header's value. `strip()` without an argument would also remove the byte 0xA0,
which can be the last byte of a UTF-8 character."""

_OPEN_PATHS = frozenset(paths_with(Rule.NO_KEY))
_ADMISSION_PATHS = frozenset(paths_with(Rule.ADMISSION))

_MOST_BUFFERED = 64
"""Maximum size of all incomplete bodies together, as a multiple of `max_body_bytes`."""


class KeyCheck:
    """Refuses requests without a valid API key."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_allowed(scope):
            await self._app(scope, receive, send)
            return
        error = APIError(
            401,
            "a valid API key is required: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            kind="authentication_error",
        )
        await _respond(error, scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if not self._keys or path_of(scope) in _OPEN_PATHS:
            return True
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_bearer = self._is_known(key) and scheme.lower() == "bearer"
        return self._is_known(headers.get("x-api-key", "")) or is_bearer

    def _is_known(self, key: str) -> bool:
        given = key.strip(_BLANKS).encode("latin-1")  # headers are decoded as latin-1: this restores the bytes
        # compare with every key, each in constant time, so that the duration reveals nothing
        return sum(hmac.compare_digest(given, known) for known in self._keys) > 0


class WholeBody:
    """Reads the whole body before a request is handled. Refuses bodies that are too large, too slow, or no JSON."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._max_bytes = options.max_body_bytes
        self._timeout_s = options.body_timeout_s
        self._num_buffered = 0
        """Size of all incomplete bodies together, in bytes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            said = Headers(scope=scope).get("content-length", "0")
            if said.isdigit() and int(said) > self._max_bytes:
                raise too_large(self._max_bytes)
            body = await asyncio.wait_for(self._read(receive), self._timeout_s)
            if body is not None:
                body = await as_json(body, scope, self._max_bytes)
        except asyncio.TimeoutError:
            late = APIError(408, f"the request body didn't arrive within {self._timeout_s:g} s", code="request_timeout")
            await _respond(late, scope, receive, send)
            return
        except APIError as error:
            await _respond(error, scope, receive, send)
            return
        if body is None:
            await Response(status_code=CLIENT_CLOSED_REQUEST)(scope, receive, send)
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, receive_again, send)

    async def _read(self, receive: Receive) -> bytes | None:
        """Read the body. Returns None if the client disconnected before the whole body had arrived.

        Raises APIError if the body is too large, or all incomplete bodies together are.
        """
        body = bytearray()
        try:
            while (message := await receive())["type"] != "http.disconnect":
                part = message.get("body", b"")
                self._num_buffered += len(part)
                body += part
                if len(body) > self._max_bytes:
                    raise too_large(self._max_bytes)
                if self._num_buffered > _MOST_BUFFERED * self._max_bytes:
                    raise _too_many(f"{self._num_buffered} bytes of incomplete request bodies")
                if not message.get("more_body", False):
                    return bytes(body)
            return None
        finally:
            self._num_buffered -= len(body)


class NoteIgnoredFields:
    """Names each request's ignored fields in the header X-Raycore-Ignored-Fields of its response, and in the log."""

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        self._options = options

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        with noting(self._options) as fields:
            add_headers(scope, lambda: {HEADER: fields.shown} if fields.names else {})
            try:
                await self._app(scope, receive, send)
            finally:
                log_ignored(scope["path"], fields)


class Admission:
    """Refuses requests to the model or its tokenizer while the engine accepts no requests, or while too many of these
    requests are in progress."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._engine = service.engine
        self._max_streams = service.options.max_streams
        self._in_progress = service.in_progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) not in _ADMISSION_PATHS:
            await self._app(scope, receive, send)
            return
        try:
            self._check_room()
        except APIError as error:
            await _respond(error, scope, receive, send)
            return
        self._in_progress.count += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._in_progress.count -= 1

    def _check_room(self) -> None:
        unavailable_reason = self._engine.unavailable_reason
        if unavailable_reason is not None:
            raise APIError(503, unavailable_reason, code="engine_unavailable", kind="service_unavailable_error")
        if self._in_progress.count >= self._max_streams:
            raise _too_many(f"{self._in_progress.count} requests in progress")


def _too_many(what: str) -> APIError:
    return APIError(
        429,
        f"this server is at its limit ({what}): try again later",
        code="too_many_requests",
        kind="rate_limit_error",
    )


async def _respond(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    headers: dict[str, Any] = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    if error.status == 415:
        headers["accept-encoding"] = "gzip, deflate"
    if error.status in (429, 503):
        headers["retry-after"] = "1"
    if error.status == 408:
        headers["connection"] = "close"  # the rest of the body must not be taken for the next request
    await JSON(error_body(error, scope), error.status, headers)(scope, receive, send)
