"""A rank's KV connector on the scheduler's side, and its KV events. Does not import torch."""

from __future__ import annotations

from raycore.cache_layout import KVCacheConfig
from raycore.config import EngineConfig
from raycore.executor.base import Executor
from raycore.extras import needing
from raycore.kv_transfer.aggregation import TransferAggregator
from raycore.kv_transfer.connector import ConnectorSetup, SchedulerConnector, connector_class
from raycore.kv_transfer.events import EventSink, KVCacheEvent


def make_connector(config: EngineConfig, cache: KVCacheConfig, executor: Executor, dp_rank: int) -> SchedulerConnector:
    """Make the scheduler's side, and tell it what the workers' sides tell at the start. The cache is allocated.

    Raises:
        InvalidConfig: the connector can't be imported, or refuses its settings.
        WorkerFailed: a worker's side failed.
    """
    num_workers = config.parallel.world_size
    found = connector_class(config)
    found.check(config)
    connector = found.scheduler_side(ConnectorSetup(config, cache, dp_rank, num_workers))
    told = executor.collective_rpc("get_kv_connector_handshake_metadata", config.executor.init_timeout_s)
    connector.set_xfer_handshake_metadata({worker: data for worker, data in enumerate(told) if data is not None})
    if num_workers > 1:
        executor.kv_output_aggregator = TransferAggregator(connector.get_finished_count() or num_workers)
    return connector


class KVEvents:
    """The KV events of a rank, on their way from the scheduler and the connector to those who want them."""

    def __init__(self, config: EngineConfig, dp_rank: int, connector: SchedulerConnector | None) -> None:
        """
        Raises:
            InvalidConfig: an endpoint can't be bound, or pyzmq isn't installed.
        """
        self.events: list[KVCacheEvent] = []
        """Those since the last `flush`. The scheduler adds to them."""
        self.sinks: list[EventSink] = []
        """What gets them, in this process."""
        self._connector = connector
        self._publisher = None
        settings = config.kv_events_config
        if settings is not None and settings.publishes:
            with needing("kv_events_config needs", "kv-events"):
                from raycore.kv_transfer.publisher import EventPublisher
            self._publisher = EventPublisher(settings, dp_rank)
            self.sinks.append(self._publisher.publish)

    def flush(self) -> None:
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
        self.flush()
        if self._publisher is not None:
            self._publisher.close()
