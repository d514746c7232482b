"""`GET /metrics`: the engine's numbers and those of HTTP itself, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.metrics.prometheus import EngineCollector
from raycore.server.generation import ServingEngine
from raycore.server.http_counts import HttpCollector, HttpCounts
from raycore.server.middleware import path_of

_SILENT_PATHS = frozenset({"/metrics", "/health", "/ping", "/version"})
"""Probes and scrapers come all the time, and nobody wants to see them."""

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Others are what clients make up, in any number."""


def add_metrics(app: FastAPI, engine: ServingEngine, model_name: str) -> None:
    """Count the app's requests, whatever becomes of them, and add `/metrics`. Call it after all middleware is there.

    The app's `state.http_counts` are its own. Where it is one of several that a scrape may reach, its
    `state.all_http_counts` are those of all of them; process metrics, which can't be added up, are then left out.
    """
    state = app.state
    state.http_counts, state.all_http_counts = HttpCounts(), None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(EngineCollector(lambda: engine.read_metrics(), model_name))
    registry.register(HttpCollector(lambda: state.all_http_counts or state.http_counts))
    registry.register(_OwnProcess(lambda: state.all_http_counts is None))
    app.add_middleware(HttpMetrics, counts=state.http_counts)

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:  # not async: it takes milliseconds, during which tokens flow
        """What Prometheus scrapes."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), media_type=content_type)


class _OwnProcess(Collector):
    """What this process has in use."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted
        self._process = ProcessCollector(registry=None)

    def describe(self) -> Iterable[Metric]:
        """Nothing: there may be none."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """None unless wanted."""
        return self._process.collect() if self._is_wanted() else ()


class HttpMetrics:
    """Counts requests and their durations: for a stream, until its last event."""

    def __init__(self, app: ASGIApp, counts: HttpCounts) -> None:
        self._app = app
        self._counts = counts

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
            duration_s = time.perf_counter() - started_s
            self._counts.add(method, f"{status // 100}xx", handler, duration_s)


def _handler(scope: Scope) -> str:
    """The path as the app knows it, without what clients put into it: they could make any number of names."""
    route = scope.get("route")
    if route is not None:
        return route.path
    # refused before it was routed
    known = {route.path for route in scope["app"].routes}
    path = path_of(scope)
    return path if path in known else "none"
