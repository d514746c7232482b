"""Who creates the spans of an engine, if somebody does. Does not import OpenTelemetry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from raycore.client.watchers import Watcher
from raycore.messages import EngineInfo


class TraceableEngine(Protocol):
    """An engine, such as `AsyncLLM`, whose outputs can include timings (`RequestOutput.trace`)."""

    def trace_requests(self) -> None:
        """Include timings in the outputs of all requests submitted from now on."""
        ...

    def watch(self, watcher: Watcher) -> None:
        """Have somebody see the requests that come from now on."""
        ...


class Traces:
    """The spans of one engine, in one process. Of this one, there are none."""

    is_on: bool = False
    """Whether spans are created."""

    def watch(self, engine: TraceableEngine, model_name: str) -> None:
        """Create spans of the requests that come from now on. Again: they get another `model_name`."""

    def engine_started(self, begun_s: float, infos: Sequence[EngineInfo]) -> None:
        """Create the spans of the engine's start, which has just ended.

        Args:
            begun_s: when it began, as `time.time()`.
            infos: what each rank reported.
        """

    def rank_up(self, info: EngineInfo) -> None:
        """Create the spans of the start of a rank that has come into service, if it has none yet."""

    def stop(self) -> None:
        """Send the remaining spans. Gives up after a few seconds. Idempotent."""


NO_TRACES = Traces()
