"""The options of LoRA adapters."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from raycore.options.declared import option


class LoRAConfig(msgspec.Struct, frozen=True):
    """Which LoRA adapters requests may use."""

    enable_lora: Annotated[
        bool,
        option(
            "Let requests use LoRA adapters (lora_request). The other options of adapters need this one.",
            is_common=True,
        ),
    ] = False
    max_loras: Annotated[int, Meta(ge=1, le=1024), option("Maximum number of different adapters in a step.")] = 1
    max_lora_rank: Annotated[int, Meta(ge=1, le=1024), option("Maximum rank of an adapter.")] = 16
    max_cpu_loras: Annotated[
        Annotated[int, Meta(ge=1, le=65536)] | None,
        option(
            "Number of adapters that a worker holds. If another one is needed, the one that hasn't been used for the "
            "longest time makes room.",
            default="max_loras",
        ),
    ] = None

    @property
    def num_adapters(self) -> int:
        """Number of adapters that a worker holds."""
        return self.max_cpu_loras or self.max_loras

    @property
    def num_slots(self) -> int:
        """Number of adapters that a worker has room for: one more, which replaces another that is still in use."""
        return self.num_adapters + 1
