"""The requests of the calls that change weights, as vLLM has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class WeightTransferInitRequest:
    """How workers connect to a trainer."""

    init_info: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class WeightTransferUpdateRequest:
    """What an update brings: for all workers, or a list with an entry for each worker of all ranks."""

    update_info: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict[str, Any])
