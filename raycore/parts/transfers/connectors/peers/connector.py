"""`PeersConnector` and `DisaggregationConnector`: ranks read each other's blocks."""

from __future__ import annotations

from typing import Any

from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.parts.transfers.connectors.connector import (
    ConnectorSetup,
    KVConnector,
    SchedulerConnector,
    WorkerConnector,
)
from raycore.parts.transfers.connectors.peers.scheduler_side import DisaggregationScheduler, PeersScheduler
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings, PeersSettings, read_settings
from raycore.parts.transfers.connectors.peers.worker_side import PeersWorker


class PeersConnector(KVConnector):
    """A prefix that another rank holds is read from it, where that takes less time than computing it."""

    settings_class: type[PeersSettings] = PeersSettings
    worker_class: type[PeersWorker] = PeersWorker

    @classmethod
    def check(cls, config: EngineConfig) -> None:
        read_settings(config, cls.settings_class)
        if not config.cache.enable_prefix_caching:
            raise InvalidConfig(
                f"kv_transfer_config's {cls.__name__} needs enable_prefix_caching: ranks know blocks by their prefixes"
            )

    @classmethod
    def check_params(cls, params: dict[str, Any], config: EngineConfig) -> None:
        # addresses are the router's to tell: a caller's could make a worker connect to anything
        raise ValueError(f"{cls.__name__} is told by raycore itself where blocks are, and by no caller: omit them")

    @classmethod
    def scheduler_side(cls, setup: ConnectorSetup) -> SchedulerConnector:
        return PeersScheduler(setup, read_settings(setup.config, cls.settings_class))

    @classmethod
    def worker_side(cls, setup: ConnectorSetup) -> WorkerConnector:
        assert setup.worker is not None, "this is a worker's side"
        return cls.worker_class(read_settings(setup.config, cls.settings_class), setup.worker)


class DisaggregationConnector(PeersConnector):
    """Some ranks compute prompts, others what follows."""

    settings_class: type[PeersSettings] = DisaggregationSettings

    @classmethod
    def scheduler_side(cls, setup: ConnectorSetup) -> SchedulerConnector:
        return DisaggregationScheduler(setup, read_settings(setup.config, DisaggregationSettings))
