"""A rank's KV connector on the scheduler's side, and its KV events. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.engine.part import EnginePart, PartedEngine
from raycore.executor.base import Executor
from raycore.extras import needing
from raycore.kvcache.cache_log import CacheLog
from raycore.messages import StepPlan
from raycore.parts.transfers.connectors.aggregation import TransferAggregator
from raycore.parts.transfers.connectors.connector import ConnectorSetup, SchedulerConnector, connector_class
from raycore.parts.transfers.connectors.events import EventSink, KVCacheEvent
from raycore.scheduler.outputs import StepOutputs
from raycore.system import time
from raycore.worker.rank import Regrouping

_POLL_S = 0.0005
"""How long the engine waits before a step that only asks workers what has become of transfers."""
_LONGEST_POLL_S = 0.005
_POLL_FRACTION = 0.125
"""The longer nothing but transfers is under way, the longer the loop sleeps between such steps, up to a limit: for this
fraction of the time."""


def make_connector(
    config: EngineConfig, cache: KVCacheConfig, executor: Executor, dp_rank: int, *, has_cache: bool
) -> SchedulerConnector:
    """Make the scheduler's side. If the cache is allocated, tell it what the workers' sides tell at the start.

    Raises:
        InvalidConfig: the connector can't be imported, or refuses its settings.
        WorkerFailed: a worker's side failed.
    """
    found = connector_class(config)
    found.check(config)
    connector = found.scheduler_side(ConnectorSetup(config, cache, dp_rank, config.parallel.world_size))
    if has_cache:
        _meet(connector, config, executor)
    return connector


def _meet(connector: SchedulerConnector, config: EngineConfig, executor: Executor) -> None:
    """Tell the scheduler's side what the workers' sides tell, whose cache has been allocated for the first time."""
    num_workers = config.parallel.world_size
    told = executor.collective_rpc("get_kv_connector_handshake_metadata", config.executor.init_timeout_s)
    connector.set_xfer_handshake_metadata({worker: data for worker, data in enumerate(told) if data is not None})
    if num_workers > 1:
        executor.kv_output_aggregator = TransferAggregator(connector.get_finished_count() or num_workers)


class ConnectorCalls(EnginePart):
    """What the scheduler's side of a connector is told between steps, and steps that only ask workers of transfers."""

    def __init__(self, engine: PartedEngine, connector: SchedulerConnector, *, is_new: bool) -> None:
        """`is_new`: whether the workers allocate the cache when the rank joins others that share experts with it."""
        self.connector = connector
        self._engine = engine
        self._scheduler = engine.scheduler
        self._is_new = is_new
        self._polling_since_s: float | None = None
        """Since when steps have only asked workers of transfers. None: they haven't."""

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {"reset_prefix_cache": self._reset_prefix_cache}

    def _reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        is_reset = self._scheduler.reset_prefix_cache(reset_running_requests)
        return self.connector.reset_cache() if is_reset and reset_connector else is_reset

    def regroup(self, regrouping: Regrouping, *, stays: bool) -> None:
        """Ask the workers of a new rank what they tell at the start: their cache exists from now on."""
        if self._is_new and stays:
            _meet(self.connector, self._engine.config, self._engine.executor)
            self._is_new = False

    def step_planned(self, plan: StepPlan, planned_s: float) -> None:
        """Wait a little before a step that only asks workers."""
        if plan.slots:
            self._polling_since_s = None
        else:
            self._polling_since_s = self._polling_since_s or planned_s
            time.sleep(_POLL_S)

    def step_done(self, plan: StepPlan, outputs: StepOutputs) -> None:
        if plan.slots:
            self.connector.observe_step(plan.num_step_tokens, outputs.duration_s)

    def pause_s(self) -> float:
        if self._polling_since_s is None:
            return 0.0
        return min(_LONGEST_POLL_S, (time.monotonic() - self._polling_since_s) * _POLL_FRACTION)

    def idle(self) -> None:
        self._polling_since_s = None

    def addresses(self) -> Sequence[str]:
        return self.connector.addresses

    def cache_logs(self) -> Sequence[CacheLog]:
        log = self.connector.cache_log
        return () if log is None else (log,)

    def close(self) -> None:
        self.connector.shutdown()


class KVEvents(EnginePart):
    """The KV events of a rank, on their way from the scheduler and the connector to those who want them."""

    def __init__(self, config: EngineConfig, dp_rank: int, connector: SchedulerConnector | None) -> None:
        """
        Raises:
            InvalidConfig: an endpoint can't be bound, or pyzmq isn't installed.
        """
        self.events: list[KVCacheEvent] = []
        """Those since the last time between steps. The scheduler adds to them."""
        self.sinks: list[EventSink] = []
        """What gets them, in this process."""
        self._connector = connector
        self._publisher = None
        settings = config.kv_events_config
        if settings is not None and settings.publishes:
            with needing("kv_events_config needs", "kv-events"):
                from raycore.parts.transfers.connectors.publisher import EventPublisher
            self._publisher = EventPublisher(settings, dp_rank)
            self.sinks.append(self._publisher.publish)

    def between_steps(self) -> None:
        """Hand the events on."""
        if self._connector is not None:
            self.events += self._connector.take_events()
        if self.events:
            events = self.events.copy()
            self.events.clear()  # the scheduler has the same list
            for sink in self.sinks:
                sink(events)

    def close(self) -> None:
        """Publish what is left, and end."""
        self.between_steps()
        if self._publisher is not None:
            self._publisher.close()
