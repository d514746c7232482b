"""Reads LoRA adapters on a background thread while steps run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from raycore.config import EngineConfig
from raycore.decoder.mixer import reorder_adapter_
from raycore.errors import RaycoreError
from raycore.lora.request import LoRARequest
from raycore.parts.adapters.checkpoint.spec import LoraSpec
from raycore.parts.adapters.layers import Adapters, ArrangedAdapter
from raycore.parts.adapters.weights import load_lora_weights
from raycore.worker.part import WorkerPart, called_by_name

if TYPE_CHECKING:
    from raycore.worker.core import WorkerCore


class AdapterReader(WorkerPart):
    """Fills the slots of the model's adapters. Its methods are called between steps."""

    option = "enable_lora=True"

    def __init__(self, core: WorkerCore) -> None:
        super().__init__(core)
        self._readings: dict[int, Future[ArrangedAdapter]] = {}
        """Adapters that are being read, by the slot that they will get."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycore-adapters", initializer=_give_way_to_steps)

    @classmethod
    def is_needed(cls, config: EngineConfig) -> bool:
        return config.lora.enable_lora

    @called_by_name
    def prepare_adapters(
        self, asked: Mapping[int, LoRARequest], dropped: Sequence[int] = ()
    ) -> tuple[list[int], dict[int, str]]:
        """Start to read adapters on a background thread. Steps can run meanwhile.

        Args:
            asked: adapters, by the slot that each will get. No request uses what is there now.
            dropped: slots whose adapters aren't needed any more.

        Returns:
            The slots of the adapters that are still being read, from this call and earlier ones, and by slot, why
            some can't be used.
        """
        self.drop_adapters(dropped)
        for slot, adapter in asked.items():
            self._readings[slot] = self._thread.submit(self.read, adapter)
        failed: dict[int, str] = {}
        for slot in [slot for slot, reading in self._readings.items() if reading.done()]:
            reading = self._readings.pop(slot)
            error = reading.exception()
            if error is None:
                self._adapters.put(slot, reading.result())
            else:
                failed[slot] = str(error) if isinstance(error, RaycoreError) else f"{type(error).__name__}: {error}"
        return list(self._readings), failed

    @called_by_name
    def drop_adapters(self, slots: Sequence[int]) -> None:
        """Give up the memory of the adapters in these slots, also of those that are still being read."""
        for slot in slots:
            reading = self._readings.pop(slot, None)
            if reading is not None:
                reading.cancel()
            self._adapters.drop(slot)

    def shut_down(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def read(self, adapter: LoRARequest) -> ArrangedAdapter:
        """Read this worker's share of an adapter.

        Raises:
            InvalidAdapter: the adapter is missing or damaged, or doesn't fit the model.
        """
        share, path = self.core.setup.share, Path(adapter.lora_path)
        lora = LoraSpec.read(path, share.spec, self.core.config.lora.max_lora_rank)
        weights = load_lora_weights(share, lora, path)
        reorder_adapter_(weights, share.spec, share.tp_size, share.layers.start)
        return self._adapters.arrange(weights)

    @property
    def _adapters(self) -> Adapters:
        assert self.core.model.adapters is not None, "the model has slots for adapters"
        return self.core.model.adapters


def _give_way_to_steps() -> None:
    """Make this thread a background thread: steps have priority."""
    torch.set_num_threads(1)  # otherwise torch starts more threads for this one, beside those that steps use
    if sys.platform == "linux":  # elsewhere, the priority is that of the whole process
        os.nice(10)
