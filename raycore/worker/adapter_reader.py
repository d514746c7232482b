"""Reads LoRA adapters on a background thread while steps run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from raycore.checkpoint.lora_spec import LoraSpec
from raycore.decoder.mixer import reorder_adapter_
from raycore.errors import RaycoreError
from raycore.layers.lora import Adapters, ArrangedAdapter
from raycore.lora.request import LoRARequest
from raycore.weights.lora_weights import load_lora_weights
from raycore.weights.share import WeightShare


class AdapterReader:
    """Fills the slots of `adapters`. Call its methods between steps."""

    def __init__(self, adapters: Adapters, share: WeightShare, max_rank: int) -> None:
        """
        Args:
            share: what this worker holds of the model.
            max_rank: the maximum rank of an adapter.
        """
        self._adapters = adapters
        self._share = share
        self._max_rank = max_rank
        self._readings: dict[int, Future[ArrangedAdapter]] = {}
        """Adapters that are being read, by the slot that they will get."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="raycore-adapters", initializer=_give_way_to_steps)

    def prepare(self, asked: Mapping[int, LoRARequest], dropped: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        """Empty the slots `dropped`, start to read what is `asked` for, and put into their slots what has been read.

        Returns the slots of adapters that are still being read, and by slot, why some can't be used.
        """
        self.drop(dropped)
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

    def drop(self, slots: Sequence[int]) -> None:
        """Give up the memory of the adapters in these slots, also of those that are still being read."""
        for slot in slots:
            reading = self._readings.pop(slot, None)
            if reading is not None:
                reading.cancel()
            self._adapters.drop(slot)

    def read(self, adapter: LoRARequest) -> ArrangedAdapter:
        """Read this worker's share of an adapter.

        Raises:
            InvalidAdapter: the adapter is missing or damaged, or doesn't fit the model.
        """
        share, path = self._share, Path(adapter.lora_path)
        lora = LoraSpec.read(path, share.spec, self._max_rank)
        weights = load_lora_weights(share, lora, path)
        reorder_adapter_(weights, share.spec, share.tp_size, share.layers.start)
        return self._adapters.arrange(weights)


def _give_way_to_steps() -> None:
    """Make this thread a background thread: steps have priority."""
    torch.set_num_threads(1)  # otherwise torch starts more threads for this one, beside those that steps use
    if sys.platform == "linux":  # elsewhere, the priority is that of the whole process
        os.nice(10)
