"""`PeersConnector` and `DisaggregationConnector`: ranks read each other's blocks."""

from __future__ import annotations

from typing import Any

import msgspec

from raycore.config import EngineConfig
from raycore.errors import InvalidConfig
from raycore.parts.transfers.config.kv_transfer import KVTransferConfig
from raycore.parts.transfers.connectors.connector import (
    ConnectorSetup,
    KVConnector,
    SchedulerConnector,
    WorkerConnector,
)
from raycore.parts.transfers.connectors.peers.scheduler_side import DisaggregationScheduler, PeersScheduler
from raycore.parts.transfers.connectors.peers.settings import DisaggregationSettings, PeersSettings, read_settings
from raycore.parts.transfers.connectors.peers.tickets import read_caller_params, tickets_of
from raycore.parts.transfers.connectors.peers.worker_side import PeersWorker


class PeersConnector(KVConnector):
    """A prefix that another rank holds is read from it, where that takes less time than computing it."""

    knows_groups = True
    knows_states = True
    settings_class: type[PeersSettings] = PeersSettings
    worker_class: type[PeersWorker] = PeersWorker

    @classmethod
    def check(cls, config: EngineConfig) -> None:
        read_settings(config, cls.settings_class)
        if not config.cache.enable_prefix_caching:
            raise InvalidConfig(
                f"kv_transfer_config's {cls.__name__} needs enable_prefix_caching: ranks know blocks by their prefixes"
            )
        cls._check_engines(_transfer(config))

    @classmethod
    def _check_engines(cls, transfer: KVTransferConfig) -> None:
        """Check what is said of this engine among others."""
        for name, value in (("kv_role", transfer.kv_role), ("engine_id", transfer.engine_id)):
            if value not in ("kv_both", None):
                raise InvalidConfig(
                    f"kv_transfer_config: {name}={value!r} is for several engines, and {cls.__name__} is for the "
                    "ranks of one: omit it, or use DisaggregationConnector"
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
        settings = read_settings(setup.config, cls.settings_class)
        if not _transfer(setup.config).is_producer:
            settings = msgspec.structs.replace(settings, host="")  # nobody on another node is served
        return cls.worker_class(settings, setup.worker)


class DisaggregationConnector(PeersConnector):
    """Some ranks compute prompts, others what follows: ranks of one engine, or whole engines."""

    settings_class: type[PeersSettings] = DisaggregationSettings

    @classmethod
    def _check_engines(cls, transfer: KVTransferConfig) -> None:
        extra = transfer.kv_connector_extra_config
        if transfer.kv_role != "kv_both" and "num_prefill_ranks" in extra:
            raise InvalidConfig(
                f"kv_connector_extra_config: num_prefill_ranks={extra['num_prefill_ranks']} divides the ranks of an "
                f"engine that does both, and kv_role={transfer.kv_role!r}: omit one of them"
            )
        for name, value in (("kv_role", transfer.kv_role), ("engine_id", transfer.engine_id)):
            if value not in ("kv_both", None) and extra.get("secret_file") is None:
                raise InvalidConfig(
                    f"kv_transfer_config: {name}={value!r} is for engines that hand over prompts to each other, which "
                    "need secret_file in kv_connector_extra_config: give it, or omit both"
                )
        tickets_of(extra.get("secret_file"))

    @classmethod
    def check_params(cls, params: dict[str, Any], config: EngineConfig) -> None:
        asked, transfer = read_caller_params(params), _transfer(config)
        secret_file = read_settings(config, DisaggregationSettings).secret_file
        if (asked.do_remote_decode or asked.do_remote_prefill) and secret_file is None:
            raise ValueError(
                "engines that hand over prompts to each other need secret_file in kv_connector_extra_config"
            )
        if asked.do_remote_decode and not transfer.is_producer:
            raise ValueError("do_remote_decode: this engine computes no prompts for others (kv_role='kv_consumer')")
        if not asked.do_remote_prefill:
            return
        if not transfer.is_consumer:
            raise ValueError("do_remote_prefill: this engine reads from no others (kv_role='kv_producer')")
        engine_id = tickets_of(secret_file).open(asked.remote_ticket).engine_id
        if asked.remote_engine_id not in ("", engine_id):
            raise ValueError(f"remote_engine_id={asked.remote_engine_id!r}, and remote_ticket is of {engine_id!r}")

    @classmethod
    def scheduler_side(cls, setup: ConnectorSetup) -> SchedulerConnector:
        return DisaggregationScheduler(setup, read_settings(setup.config, DisaggregationSettings))


def _transfer(config: EngineConfig) -> KVTransferConfig:
    assert config.kv_transfer_config is not None, "there is a connector"
    return config.kv_transfer_config
