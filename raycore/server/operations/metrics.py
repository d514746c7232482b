"""`GET /metrics`: metrics of the engine, of HTTP and of the process, for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.metrics.prometheus import EngineCollector
from raycore.server.contract.handlers import answers
from raycore.server.contract.service import Context, Service
from raycore.server.endpoints import Rule, path_of, paths_with
from raycore.server.http.counts import HttpCollector, HttpCounts

_SILENT_PATHS = frozenset(paths_with(Rule.NOT_COUNTED))

_OPEN_METRICS = "application/openmetrics-text"

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that have a label of their own. All others count as `other`, because clients can invent any number of them.
"""


class Metrics:
    """What `/metrics` shows. If several API servers share a port, `all_http_counts` is set to the sum of their counts.

    It then shows that sum, and no metrics of the process, which can't be summed.
    """

    def __init__(self, service: Service) -> None:
        self.all_http_counts: HttpCounts | None = None
        self.registry = CollectorRegistry(auto_describe=False)
        names = service.options.served_model_names
        self.registry.register(EngineCollector(lambda: service.engine.read_metrics(), names[0]))
        self.registry.register(HttpCollector(lambda: self.all_http_counts or service.http_counts))
        self.registry.register(_OwnProcess(lambda: self.all_http_counts is None))


@answers(PlainTextResponse)
def metrics(context: Context) -> Response:  # not async: its milliseconds would delay streams on the event loop
    """Metrics for Prometheus."""
    # prometheus_client otherwise writes vllm_… for vllm:… in OpenMetrics, which is what Prometheus asks for
    accept = context.http.headers.get("accept", "").replace(_OPEN_METRICS, f"{_OPEN_METRICS};escaping=allow-utf-8")
    encode, content_type = choose_encoder(accept)
    return Response(encode(context.service.own(Metrics).registry), media_type=content_type)


class _OwnProcess(Collector):
    """The collector for CPU time, memory and open files of this process."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted
        self._process = ProcessCollector(registry=None)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering the collector doesn't read the process's metrics."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """The process's metrics; none if `is_wanted()` returns False."""
        return self._process.collect() if self._is_wanted() else ()


class HttpMetrics:
    """ASGI middleware that counts requests and their durations. A streamed response counts until its last event."""

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
    """The label for a request's handler: the path pattern of its route.

    The request's path itself would let clients create any number of labels.
    """
    route = scope.get("route")
    if route is not None:
        return route.path
    # the request was refused before it was routed
    known = {route.path for route in scope["app"].routes}
    path = path_of(scope)
    return path if path in known else "none"
