"""What the server needs of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from raycore.client.ask import Ask
from raycore.client.engine_facts import EngineFacts
from raycore.client.watchers import Watcher
from raycore.control.calls import AsyncCalls
from raycore.metrics.view import MetricsView
from raycore.parts.traces.client.traces import Traces


class ServingEngine(EngineFacts, AsyncCalls, Protocol):
    """The engine interface that the server uses; `AsyncLLM` implements it."""

    def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[Any, None]:
        """Run requests, and yield their outputs: see `Streams.ask`. All prompts come this way.

        Outputs of a request that generates are cumulative, and the last one is finished.
        """
        ...

    traces: Traces
    """The spans of its requests."""

    def watch(self, watcher: Watcher) -> None:
        """Have somebody see the requests that come from now on."""
        ...

    def trace_requests(self) -> None:
        """Include timings in the outputs of all requests submitted from now on."""
        ...

    async def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        """Abort requests of all API servers. None: all of them. Returns how many of the engine's there were.

        Ids are those of the engine's requests, or of responses, whose prompts are requests of their own.
        """
        ...

    def read_metrics(self) -> MetricsView:
        """The engine's current metrics."""
        ...
