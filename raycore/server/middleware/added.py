"""Adds the middleware that a server's options name: for web pages of other origins, and the user's own."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from raycore.errors import InvalidConfig
from raycore.server.http.ignored_fields import HEADER as IGNORED_FIELDS
from raycore.server.http.request_ids import ANTHROPIC_ID, REQUEST_ID
from raycore.server.http_options import HttpOptions

_EXPOSED = (REQUEST_ID, ANTHROPIC_ID, IGNORED_FIELDS, "retry-after")
"""The headers of responses that web pages need. Browsers show them no others but those of the content."""


def add_middleware(app: FastAPI, options: HttpOptions) -> None:
    """Add what `options` asks for around what the app has so far.

    Raises:
        InvalidConfig: a middleware can't be imported, or is neither a class nor a coroutine function.
    """
    app.add_middleware(admitting_pages, options=options)
    for path in options.middleware:
        found = find_middleware(path)
        if inspect.isclass(found):
            added: Any = found
            app.add_middleware(added)
        else:
            app.middleware("http")(found)


def admitting_pages(app: ASGIApp, options: HttpOptions) -> ASGIApp:
    """Let web pages of the allowed origins read the responses of an application."""
    if not options.allowed_origins:
        return app
    return _Origins(
        app,
        allow_origins=options.allowed_origins,
        allow_methods=options.allowed_methods,
        allow_headers=options.allowed_headers,
        allow_credentials=options.allow_credentials,
        expose_headers=_EXPOSED,
    )


class _Origins(CORSMiddleware):
    """Lets web pages of other origins read responses.

    A POST without an origin comes from no web page, and no cache keeps its response. So nothing is added to it, and its
    stream is sent without a call for each event.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and "origin" not in Headers(scope=scope):
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)


def find_middleware(path: str) -> Any:
    """The class or coroutine function that `module.name` names.

    Raises:
        InvalidConfig: it can't be imported, or is something else.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # the module is the user's: it may raise anything
        raise InvalidConfig(
            f"middleware={path} can't be imported ({type(error).__name__}: {error}): name it as package.module.Name, "
            "in a module that Python finds, such as by PYTHONPATH"
        ) from error
    if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
        raise InvalidConfig(f"middleware={path} is neither a class nor a coroutine function")
    return found
