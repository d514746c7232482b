"""The offload connector: blocks of the prefix cache are kept in the host's memory and in files, and come back.

All full blocks are copied when they are complete, unless they are there already. Blocks in the host's memory are loaded
before the step that needs them. Those in files are read on a thread while the request waits.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from raycore.config import EngineConfig
from raycore.config.options import settings_of
from raycore.errors import InvalidConfig
from raycore.kv_transfer.connector import ConnectorSetup, KVConnector, SchedulerConnector, WorkerConnector


class OffloadSettings(msgspec.Struct, frozen=True):
    """`kv_connector_extra_config`, with vLLM's names where vLLM has the setting."""

    cpu_bytes_to_use: Annotated[int, Meta(ge=0)] = 0
    """Host memory, of all workers of a rank together."""
    path: str | None = None
    """A directory for files, which ranks, engines and restarts share. A rank on several nodes needs a shared one."""
    disk_bytes: Annotated[int, Meta(ge=1)] = 10 << 30
    """Of all files in the directory."""
    load_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """A request whose files haven't been read by then is computed."""
    always_load: bool = False
    """Load also where computing should be faster, as measured."""
    spec_name: Literal["CPUOffloadingSpec"] = "CPUOffloadingSpec"
    eviction_policy: Literal["lru"] = "lru"


class OffloadConnector(KVConnector):
    """Makes the two sides."""

    @classmethod
    def check(cls, config: EngineConfig) -> None:
        assert config.kv_transfer_config is not None
        settings = settings_of(
            "kv_connector_extra_config", config.kv_transfer_config.kv_connector_extra_config, OffloadSettings
        )
        if not settings.cpu_bytes_to_use and settings.path is None:
            raise InvalidConfig(
                "OffloadConnector has nowhere to keep blocks: give cpu_bytes_to_use or path in "
                "kv_connector_extra_config, or kv_offloading_size"
            )
        if not config.cache.enable_prefix_caching:
            raise InvalidConfig(
                "OffloadConnector keeps blocks of the prefix cache, and enable_prefix_caching=False: omit one of them"
            )

    @classmethod
    def scheduler_side(cls, setup: ConnectorSetup) -> SchedulerConnector:
        from raycore.kv_transfer.offload.scheduler import OffloadScheduler

        return OffloadScheduler(setup, _settings(setup))

    @classmethod
    def worker_side(cls, setup: ConnectorSetup) -> WorkerConnector:
        from raycore.kv_transfer.offload.worker import OffloadWorker

        return OffloadWorker(setup, _settings(setup))


def _settings(setup: ConnectorSetup) -> OffloadSettings:
    return settings_of("kv_connector_extra_config", setup.extra, OffloadSettings)
