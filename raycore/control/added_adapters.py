"""The LoRA adapters that users have added to an engine, on all its ranks."""

from __future__ import annotations

from raycore.lora.request import LoRARequest


class AdapterCalls:
    """The calls that add and remove adapters. Thread-safe."""

    def add(self, adapter: LoRARequest) -> bool:
        """See `LLM.add_lora`."""
        raise NotImplementedError

    def remove(self, lora_id: int) -> bool:
        """See `LLM.remove_lora`."""
        raise NotImplementedError

    def pin(self, lora_id: int) -> bool:
        """See `LLM.pin_lora`."""
        raise NotImplementedError

    def ids(self) -> set[int]:
        """See `LLM.list_loras`."""
        raise NotImplementedError
