"""The classes of vLLM's configuration that scripts construct to pass them to an engine.

In raycore, the options that take them take objects of JSON. So these classes are dicts with attributes, and the option
checks what is in them.
"""

from __future__ import annotations

import json
from typing import Any

from typing_extensions import Self


class Settings(dict[str, Any]):
    """The settings that were given, as a dict and as attributes."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(settings)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"{type(self).__name__} was given no {name}", name=name)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @classmethod
    def from_cli(cls, cli_value: str) -> Self:
        """The settings in a JSON text."""
        return cls(**json.loads(cli_value))


class CompilationConfig(Settings):
    """For `compilation_config`, which has no effect: models aren't compiled."""


class ECTransferConfig(Settings):
    """For `ec_transfer_config`."""


class EPLBConfig(Settings):
    """For `eplb_config`."""


class KVEventsConfig(Settings):
    """For `kv_events_config`."""


class KVTransferConfig(Settings):
    """For `kv_transfer_config`."""


class ProfilerConfig(Settings):
    """For `profiler_config`."""


class SpeculativeConfig(Settings):
    """For `speculative_config`."""


class StructuredOutputsConfig(Settings):
    """For `structured_outputs_config`."""


class AttentionConfig(Settings):
    """For `attention_config`."""


class KernelConfig(Settings):
    """For `kernel_config`."""


class ReasoningConfig(Settings):
    """For `reasoning_config`."""


class WeightTransferConfig(Settings):
    """For `weight_transfer_config`."""
