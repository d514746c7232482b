"""`GET /metrics`: the engine's numbers and those of HTTP itself, for Prometheus."""

from __future__ import annotations

import time

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.metrics.prometheus import EngineCollector
from raycore.server.generation import ServingEngine
from raycore.server.middleware import path_of

_SILENT_PATHS = frozenset({"/metrics", "/health", "/ping", "/version"})
"""Probes and scrapers come all the time, and nobody wants to see them."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Others are what clients make up, in any number."""

_BOUNDS_S = (0.1, 0.5, 1.0, 5.0, 30.0, 120.0)


def add_metrics(app: FastAPI, engine: ServingEngine, model_name: str) -> None:
    """Count the app's requests, whatever becomes of them, and add `/metrics`. Call it after all middleware is there."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(lambda: engine.read_metrics(), model_name))
    ProcessCollector(registry=registry)
    app.add_middleware(HttpMetrics, registry=registry)

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:  # not async: it takes milliseconds, during which tokens flow
        """What Prometheus scrapes."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)


class HttpMetrics:
    """Counts requests and their durations: for a stream, until its last event."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "http_requests",
            "Requests by method, status and handler.",
            ("method", "status", "handler"),
            registry=registry,
        )
        self._durations = Histogram(
            "http_request_duration_seconds",
            "From a request's headers to its answer's end.",
            ("method", "handler"),
            buckets=_BOUNDS_S,
            registry=registry,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or path_of(scope) in _SILENT_PATHS:
            await self._app(scope, receive, send)
            return
        status, started_s = 500, time.perf_counter()

        async def watching(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watching)
        finally:
            method = scope["method"] if scope["method"] in _METHODS else "other"
            handler = _handler(scope)
            self._requests.labels(method, f"{status // 100}xx", handler).inc()
            self._durations.labels(method, handler).observe(time.perf_counter() - started_s)


def _handler(scope: Scope) -> str:
    """The path as the app knows it, without what clients put into it: they could make any number of names."""
    route = scope.get("route")
    if route is not None:
        return route.path
    # refused before it was routed
    known = {route.path for route in scope["app"].routes}
    path = path_of(scope)
    return path if path in known else "none"
