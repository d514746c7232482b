"""What stands before every request: the key, the size of its body, how many may be under way."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.server.errors import APIError
from raycore.server.generation import ServingEngine
from raycore.server.options import ServerOptions
from raycore.server.streaming import JSON

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""Probes and scrapers have no key."""

GENERATING_PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
_COSTLY_PATHS = GENERATING_PATHS | {"/tokenize", "/detokenize"}


class BodyLimit:
    """Refuses bodies that are too large, before they are read where they say so."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = Headers(scope=scope).get("content-length", "0")
        if said.isdigit() and int(said) > self._max_bytes:
            await self._refuse()(scope, receive, send)
            return
        num_received = 0

        async def counting() -> Message:
            nonlocal num_received
            message = await receive()
            num_received += len(message.get("body", b""))
            if num_received > self._max_bytes:
                raise self._too_large()
            return message

        await self._app(scope, counting, send)

    def _too_large(self) -> APIError:
        return APIError(413, f"the body is larger than {self._max_bytes} bytes", code="request_too_large")

    def _refuse(self) -> JSON:
        error = self._too_large()
        return JSON(error.body(), error.status)


class Admission:
    """Checks the key, and turns what is costly away while the engine takes none or has enough."""

    def __init__(self, app: ASGIApp, engine: ServingEngine, options: ServerOptions) -> None:
        self._app = app
        self._engine = engine
        self._keys = [key.encode() for key in options.api_keys]
        self._max_streams = options.max_streams
        self._num_streams = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            if _path(scope) not in _COSTLY_PATHS:
                await self._app(scope, receive, send)
                return
            self._check_room()
        except APIError as error:
            await _respond(error, scope, receive, send)
            return
        self._num_streams += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_streams -= 1

    def _check_key(self, scope: Scope) -> None:
        if not self._keys or _path(scope) in OPEN_PATHS:
            return
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # as headers are decoded, so these are the bytes that came
        # every key is compared, each in constant time, so that the time taken tells nothing
        num_equal = sum(hmac.compare_digest(given, known) for known in self._keys)
        if scheme.lower() != "bearer" or not num_equal:
            raise APIError(
                401,
                "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                kind="authentication_error",
            )

    def _check_room(self) -> None:
        trouble = self._engine.trouble
        if trouble is not None:
            raise APIError(503, trouble, code="engine_unavailable", kind="service_unavailable_error")
        if self._num_streams >= self._max_streams:
            raise APIError(
                429,
                f"{self._num_streams} requests are under way, which is all that this server takes: try again later",
                code="too_many_requests",
                kind="rate_limit_error",
            )


def _path(scope: Scope) -> str:
    """Below the prefix at which the application is mounted, as Ray Serve can do."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


async def _respond(error: APIError, scope: Scope, receive: Receive, send: Send) -> None:
    headers: dict[str, Any] = {"www-authenticate": "Bearer"} if error.status == 401 else {}
    if error.status in (429, 503):
        headers["retry-after"] = "1"
    await JSON(error.body(), error.status, headers)(scope, receive, send)
