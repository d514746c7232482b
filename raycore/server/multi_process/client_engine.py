"""The engine's interface for an API server: the server's process reaches the ranks through a client of its own."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from raycore.client.ask import Ask
from raycore.client.client import EngineClient
from raycore.client.engine_facts import EngineFacts
from raycore.client.streams import Streams
from raycore.client.watchers import Watcher
from raycore.config import EngineConfig
from raycore.control.calls import AsyncCalls
from raycore.metrics.view import MetricsView
from raycore.node.own_process import OwnProcess
from raycore.parts.pooling.client.pooling import supported_tasks
from raycore.parts.traces.client.making import make_traces
from raycore.parts.traces.client.traces import Traces
from raycore.server.http.counts import HttpCounts
from raycore.server.multi_process.driver_calls import READ_METRICS, DriverCalls

_METRICS_TIMEOUT_S = 30.0


class ClientEngine(OwnProcess, EngineFacts, AsyncCalls):
    """A `ServingEngine` for the ranks of an engine that another process, the driver, has created.

    The driver makes the calls on the engine.
    """

    def __init__(self, config: EngineConfig, client: EngineClient, driver: DriverCalls) -> None:
        self.config = config
        self._client = client
        self._driver = driver
        self._streams = Streams(client)
        self.traces: Traces = make_traces(config.traces)
        self.on_http_counts: Callable[[HttpCounts], object] = lambda counts: None
        """Gets the sum of all API servers' HTTP counts whenever the metrics are read."""

    def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[Any, None]:
        return self._streams.ask(asks)

    def watch(self, watcher: Watcher) -> None:
        self._client.watchers.add(watcher)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return supported_tasks(self._client.checks.pooling)

    async def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        return await self._driver.call("abort_requests", request_ids=request_ids)

    def read_metrics(self) -> MetricsView:
        """The metrics of the whole engine, of all API servers. Those of others may be a few seconds old.

        Asks the driver, and waits for its answer, so don't call this on an event loop. Raises TimeoutError if there is
        none within 30 s.
        """
        metrics, counts = self._driver.call_and_wait(READ_METRICS, _METRICS_TIMEOUT_S)
        self.on_http_counts(counts)
        return metrics

    def trace_requests(self) -> None:
        self._client.trace_requests()

    async def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        arguments = inspect.signature(call).bind_partial(None, *args, **kwargs).arguments
        del arguments["self"]
        return await self._driver.call(call.__name__, **arguments)
