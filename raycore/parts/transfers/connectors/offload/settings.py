"""The settings of the offload connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from raycore.options.declared import settings_of


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


def read_settings(extra: Mapping[str, Any]) -> OffloadSettings:
    """Read `kv_connector_extra_config`. Raises InvalidConfig if a setting is unknown or invalid."""
    return settings_of("kv_connector_extra_config", extra, OffloadSettings)
