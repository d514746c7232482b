"""Spans of HTTP requests. Needs `pip install 'raycore[otel]'`."""

from __future__ import annotations

from fastapi import FastAPI
from opentelemetry.trace import SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.parts.traces.client.spans import SentTraces
from raycore.server.contract.engine import ServingEngine
from raycore.server.endpoints import Rule, path_of, paths_with

_TRACED_PATHS = frozenset(paths_with(Rule.TRACED))


def add_traces(app: FastAPI, engine: ServingEngine, model_name: str) -> None:
    """Have each request to the model create spans, with this name of the model."""
    assert isinstance(engine.traces, SentTraces), "they are on"
    engine.traces.watch(engine, model_name)
    app.add_middleware(TraceRequests, tracer=engine.traces.tracer)


class TraceRequests:
    """ASGI middleware that creates a span for each request to the model.

    The span belongs to the trace that the request's `traceparent` header names, or else to a new trace.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else ""
        if path not in _TRACED_PATHS:
            await self._app(scope, receive, send)
            return
        context = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        attributes = {"http.request.method": scope["method"], "http.route": path}
        name = f"{scope['method']} {path}"
        with self._tracer.start_as_current_span(name, context, SpanKind.SERVER, attributes) as span:

            async def watching(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, watching)
