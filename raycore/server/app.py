"""The ASGI application that serves the OpenAI API for an engine."""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import version

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from raycore.client.request_log import RequestLog
from raycore.errors import InvalidConfig, RaycoreError
from raycore.parts.adapters.server.adapters import AdapterSource
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.models import Models
from raycore.server.contract.routes import add_endpoints
from raycore.server.contract.service import Service
from raycore.server.dialects.invocations import Invocations
from raycore.server.dialects.responses.store import MemoryStore, ResponseStore
from raycore.server.http.bodies import add_long_bodies
from raycore.server.http.error_bodies import error_body
from raycore.server.http.errors import APIError, invalid_body, unreadable_body
from raycore.server.http.json_text import to_json
from raycore.server.http.request_ids import RequestIds, headers_of, request_id_of, told_error
from raycore.server.http.route_index import RouteIndex
from raycore.server.http.streaming import CLIENT_CLOSED_REQUEST, JSON, ClientLeft
from raycore.server.http.unknown_paths import unknown_path, wrong_method
from raycore.server.middleware.added import add_middleware
from raycore.server.middleware.checks import Admission, KeyCheck, NoteIgnoredFields, WholeBody
from raycore.server.openapi.document import describe
from raycore.server.operations.metrics import HttpMetrics
from raycore.server.options import ServerOptions, limited_by

logger = logging.getLogger(__name__)


def build_app(
    engine: ServingEngine,
    options: ServerOptions,
    adapters: AdapterSource | None = None,
    response_store: ResponseStore | None = None,
    *,
    returns_request_ids: bool = True,
) -> FastAPI:
    """Build the application. The application doesn't own `engine`: the caller has to shut the engine down.

    Args:
        adapters: the LoRA adapters that it offers, from `load_adapters(engine, options)`. None: none, and none can be
            loaded.
        response_store: where responses are stored. None: in this process.
        returns_request_ids: whether responses have a header X-Request-Id. False: whoever serves the application adds
            it, as Ray Serve does.

    Raises:
        InvalidConfig: `options` has adapters, and `adapters` is None.
    """
    if adapters is None and (options.lora_modules or options.allowed_lora_directories):
        raise InvalidConfig("lora_modules and allowed_lora_directories: build_app() needs `await load_adapters(...)`")
    if options.log.enable_log_requests:
        log = options.log
        engine.watch(
            RequestLog(
                engine.get_tokenizer(),
                outputs=log.enable_log_outputs,
                deltas=log.enable_log_deltas,
                max_len=log.max_log_len,
            )
        )
    app = FastAPI(
        title="raycore",
        version=version("raycore"),
        docs_url=None if options.http.disable_fastapi_docs else "/docs",
        openapi_url=None if options.http.disable_fastapi_docs else "/openapi.json",
        redoc_url=None,
        strict_content_type=False,  # parse a body as JSON even without a Content-Type header
    )
    options = limited_by(options, engine)
    app.root_path = options.http.root_path
    if response_store is None and engine.pooling_spec is None:
        response_store = MemoryStore(options.max_stored_responses, options.max_stored_response_bytes)
    service = Service(engine, options, Models(options.served_model_names), adapters, response_store)
    app.state.service = service
    add_long_bodies(app)
    if adapters is not None:
        adapters.subscribe(service.models.set_adapters)
    app.add_middleware(Admission, service=service)
    app.add_middleware(Invocations, spec=engine.pooling_spec)
    app.add_middleware(WholeBody, options=options)
    app.add_middleware(NoteIgnoredFields, options=options)
    app.add_middleware(KeyCheck, options=options)
    app.add_middleware(HttpMetrics, counts=service.http_counts)
    add_middleware(app, options.http)
    app.add_middleware(RequestIds, returns=returns_request_ids)  # the outermost, because errors name the id
    if engine.traces.is_on:
        from raycore.parts.traces.server import add_traces  # imported lazily: it needs another extra

        add_traces(app, engine, options.served_model_names[0])
    _handle_errors(app)
    add_endpoints(app, service)
    app.router.middleware_stack = RouteIndex(app.router)
    # FastAPI encodes the description itself
    app.openapi = cache(lambda: msgspec.json.decode(to_json(describe(app, options, engine))))
    return app


def _handle_errors(app: FastAPI) -> None:
    """Answer every error with an error object."""

    async def told(request: Request, error: Exception) -> Response:
        api_error = told_error(error, request.scope)
        if api_error.status == 500 and api_error is not error:
            what = request.method, request.url.path, request_id_of(request.scope)
            logger.error("%s %s failed, request %s", *what, exc_info=error)
        return JSON(error_body(api_error, request.scope), api_error.status, headers_of(request.scope))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return JSON(error_body(invalid_body(error.errors()), request.scope), 400)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        if error.status_code == 404:
            told = unknown_path(request)
        elif error.status_code == 405:
            told, headers["allow"] = wrong_method(request)
        else:
            told = unreadable_body(error)
        return JSON(error_body(told, request.scope), told.status, headers)

    async def left(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientLeft, left)
    for kind in (APIError, RaycoreError, Exception):
        app.add_exception_handler(kind, told)
