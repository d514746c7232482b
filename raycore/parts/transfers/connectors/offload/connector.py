"""The offload connector: blocks of the prefix cache are kept in the host's memory and in files, and come back.

All full blocks are copied when they are complete, unless they are there already. Blocks in the host's memory are loaded
before the step that needs them. Those in files are read on a thread while the request waits.
"""

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
from raycore.parts.transfers.connectors.offload.settings import read_settings


class OffloadConnector(KVConnector):
    """Makes the two sides."""

    knows_groups = True
    knows_states = True

    @classmethod
    def check(cls, config: EngineConfig) -> None:
        assert config.kv_transfer_config is not None
        settings = read_settings(config.kv_transfer_config.kv_connector_extra_config)
        if not settings.cpu_bytes_to_use and settings.path is None:
            raise InvalidConfig(
                "OffloadConnector has nowhere to keep blocks: give cpu_bytes_to_use or path in "
                "kv_connector_extra_config, or kv_offloading_size"
            )
        if config.kv_transfer_config.engine_id is not None:
            raise InvalidConfig(
                f"kv_transfer_config: engine_id={config.kv_transfer_config.engine_id!r} names an engine to others, and "
                "OffloadConnector knows blocks by their tokens, whoever has saved them: omit it"
            )
        if not config.cache.enable_prefix_caching:
            raise InvalidConfig(
                "OffloadConnector keeps blocks of the prefix cache, and enable_prefix_caching=False: omit one of them"
            )

    @classmethod
    def check_params(cls, params: dict[str, Any], config: EngineConfig) -> None:
        raise ValueError("OffloadConnector knows blocks by their tokens, and reads no parameters: omit them")

    @classmethod
    def scheduler_side(cls, setup: ConnectorSetup) -> SchedulerConnector:
        from raycore.parts.transfers.connectors.offload.scheduler import OffloadScheduler

        return OffloadScheduler(setup, read_settings(setup.extra))

    @classmethod
    def worker_side(cls, setup: ConnectorSetup) -> WorkerConnector:
        from raycore.parts.transfers.connectors.offload.worker import OffloadWorker

        return OffloadWorker(setup, read_settings(setup.extra))
