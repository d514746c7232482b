"""The settings of connectors that read blocks of other ranks: `kv_connector_extra_config`."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from raycore.config import EngineConfig
from raycore.options.declared import settings_of


class PeersSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What both connectors can be told."""

    min_fetch_tokens: Annotated[int, Meta(ge=1)] = 64
    """Fewer tokens are computed without asking what would take less time."""
    fetch_timeout_s: Annotated[float, Meta(gt=0)] = 10.0
    """What hasn't arrived after so many seconds is computed."""
    compare_costs: bool = True
    """Whether prefixes are only read where that is expected to take less time than computing them. False: always."""
    num_threads: Annotated[int, Meta(ge=1)] = 2
    """How many requests' blocks a worker reads at the same time."""
    host: str | None = None
    """The address at which workers on other nodes reach this one. None: as this machine knows it. Empty: no others."""


class DisaggregationSettings(PeersSettings, frozen=True, forbid_unknown_fields=True):
    """What prefill and decode ranks can be told, besides."""

    num_prefill_ranks: Annotated[int, Meta(ge=0)] = 1
    """The first so many ranks compute prompts, and the others what follows. 0: all compute both."""
    min_prefill_tokens: Annotated[int, Meta(ge=1)] = 128
    """Prompts of which a decode rank would compute fewer tokens go to it at once."""
    lease_s: Annotated[float, Meta(gt=0)] = 30.0
    """How many seconds a prompt's blocks are kept for another rank."""
    secret_file: str | None = None
    """A file with a secret, the same for all engines that hand over prompts to each other. None: this one doesn't."""


_S = TypeVar("_S", bound=PeersSettings)


def read_settings(config: EngineConfig, kind: type[_S]) -> _S:
    """Read an engine's settings. Raises InvalidConfig if one is unknown or invalid."""
    assert config.kv_transfer_config is not None, "there is a connector"
    return settings_of("kv_connector_extra_config", config.kv_transfer_config.kv_connector_extra_config, kind)
