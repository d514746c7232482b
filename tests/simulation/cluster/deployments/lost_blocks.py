"""Requests that fail because of blocks that were found elsewhere, and then didn't come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raycore.errors import RequestFailed

_NOT_LOADED = "keys and values of its prompt were not loaded, and kv_load_failure_policy is 'fail'"


def may_lack_blocks(error: BaseException, options: Mapping[str, Any], *, has_broken: bool) -> bool:
    """Whether a request may fail so because blocks that were found elsewhere didn't come."""
    transfer: dict[str, Any] = options.get("kv_transfer_config") or {}
    if transfer.get("kv_load_failure_policy") != "fail" or _NOT_LOADED not in str(error):
        return False
    settings: dict[str, Any] = transfer["kv_connector_extra_config"]
    is_short_of_time = min(settings.get(each, 10.0) for each in ("load_timeout_s", "fetch_timeout_s")) < 1.0
    # between a look and a read, files may be removed and another rank may drop blocks, so that others have room
    may_be_dropped = "disk_bytes" in settings or transfer["kv_connector"] != "OffloadConnector"
    return isinstance(error, RequestFailed) and (has_broken or is_short_of_time or may_be_dropped)
