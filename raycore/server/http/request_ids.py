"""The ids by which clients, proxies and logs know a request."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.server.endpoints import is_anthropic, path_of
from raycore.server.http.errors import APIError, as_api_error

REQUEST_ID = "x-request-id"
ANTHROPIC_ID = "request-id"
"""The header in which clients of Anthropic's API look for the id."""
_USABLE_ID = re.compile(r"[!-~]{1,128}")
_ID_KEY, _HEADERS_KEY = "raycore.request_id", "raycore.headers"


class RequestIds:
    """Gives each request the id in its header X-Request-Id, or a new one, and returns it in the response's headers.

    An id has 1 to 128 printable ASCII characters, and no spaces. A header with anything else is ignored.
    """

    def __init__(self, app: ASGIApp, returns: bool) -> None:
        """`returns`: whether responses get the header."""
        self._app = app
        self._returns = returns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given, new = Headers(scope=scope).get(REQUEST_ID, ""), uuid.uuid4().hex
        is_usable = _USABLE_ID.fullmatch(given) is not None
        # the same header may come again while the first request runs, and the engine's ids must differ
        scope[_ID_KEY] = f"{given}-{new[:8]}" if is_usable else new
        names = [REQUEST_ID, *([ANTHROPIC_ID] if is_anthropic(path_of(scope)) else [])] if self._returns else []
        ids = dict.fromkeys(names, given if is_usable else new)
        scope[_HEADERS_KEY] = [lambda: ids]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(headers_of(scope))
            await send(message)

        await self._app(scope, receive, send_with_headers)


def request_id_of(scope: Scope) -> str:
    """The id under which errors are logged, and that the engine's ids of the request contain. It is unique."""
    return scope[_ID_KEY]


def add_headers(scope: Scope, make: Callable[[], Mapping[str, str]]) -> None:
    """Have every response to a request get the headers that `make()` returns when the response begins.

    This costs nothing for the rest of a stream, where a middleware of its own would be called with each event.
    """
    scope[_HEADERS_KEY].append(make)


def headers_of(scope: Scope) -> dict[str, str]:
    """The headers of every response to a request, for responses that `RequestIds` doesn't see."""
    return {name: value for make in scope[_HEADERS_KEY] for name, value in make().items()}


def told_error(error: BaseException, scope: Scope) -> APIError:
    """The error response for an exception. If it is the server's fault, it has the id under which it is logged."""
    told = as_api_error(error)
    if told.status != 500 or told is error:
        return told
    return APIError(500, f"{told.message} (request {request_id_of(scope)})", code=told.code, kind=told.kind)
