"""Checks the adapters of requests where the requests are submitted, before anything else gets them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from raycore.config import LoRAConfig
from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.lora.request import LoRARequest
from raycore.models.spec import ModelSpec
from raycore.parts.adapters.checkpoint.spec import LoraSpec

_MAX_KNOWN = 4096
"""Number of adapters that are known to be valid. They aren't checked again."""


class AdapterChecks:
    """The adapters that a client has checked. Thread-safe."""

    def __init__(self, spec: ModelSpec, config: LoRAConfig) -> None:
        self._spec = spec
        self._config = config
        self._known: dict[LoRARequest, None] = {}

    def __contains__(self, adapter: LoRARequest) -> bool:
        """Whether the adapter is known to be valid, so that `check()` reads no files."""
        return adapter in self._known

    def check(self, adapter: LoRARequest) -> None:
        """Check that the engine can use an adapter. Reads its config.json and the names of its tensors, once.

        Raises:
            InvalidRequest: it can't. The message says why.
        """
        if not self._config.enable_lora:
            raise InvalidRequest(f"lora_request={adapter.lora_name!r} needs an engine with enable_lora=True")
        if adapter.load_inplace:
            raise InvalidRequest(
                f"lora_request={adapter.lora_name!r}: load_inplace=True is for add_lora(). Add the adapter with it, "
                "and then submit requests without it"
            )
        if adapter not in self._known:
            self._read(adapter)

    def check_new(self, adapter: object) -> None:
        """Check an adapter that will be added, whether or not it is known: its files may have changed.

        Raises:
            InvalidRequest: it isn't an adapter, or the engine can't use it. The message says why.
        """
        if not isinstance(adapter, LoRARequest):
            raise InvalidRequest(f"add_lora(): lora_request={shortened(adapter)} isn't a LoRARequest")
        if not self._config.enable_lora:
            raise InvalidRequest(f"add_lora({adapter.lora_name!r}) needs an engine with enable_lora=True")
        self._read(msgspec.structs.replace(adapter, load_inplace=False))

    def _read(self, adapter: LoRARequest) -> None:
        LoraSpec.read(Path(adapter.lora_path), self._spec, self._config.max_lora_rank)
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[adapter] = None
