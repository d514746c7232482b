"""What a worker prepares in the background: adapters, which it reads, and constraints, which it compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from raycore.lora.request import LoRARequest
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import time
from simulation.worker import model
from simulation.worker.chance import Chance

_READ_S, _COMPILE_S = 0.05, 0.02
BROKEN = "broken"
"""An adapter can't be read from a directory with this in its name."""


class Adapters:
    """The adapters by slot. A slot is garbage until its adapter has been read."""

    def __init__(self, num_slots: int, chance: Chance) -> None:
        self._chance = chance
        self._keys = np.append(chance.garbage(num_slots), np.uint64(0))
        """By slot, and at last that of requests without adapter."""
        self._under_way: dict[int, tuple[float, str]] = {}
        """By slot: when it will have been read, and from where."""

    def prepare(self, asked: Mapping[int, LoRARequest], dropped: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        """See `Worker.prepare_adapters`."""
        self.drop([slot for slot in dropped if slot not in asked])
        for slot, adapter in asked.items():
            self._keys[slot] = self._chance.garbage(1)[0]
            self._under_way[slot] = time.monotonic() + self._chance.duration_s(_READ_S), adapter.lora_path
        failed = self._settle()
        return list(self._under_way), failed

    def drop(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._under_way.pop(slot, None)
            self._keys[slot] = self._chance.garbage(1)[0]

    def keys(self, slots: model.Ints) -> model.Words:
        """What the adapters in these slots do. `NO_ADAPTER`: nothing."""
        return self._keys[slots]

    def _settle(self) -> dict[int, str]:
        failed: dict[int, str] = {}
        now_s = time.monotonic()
        for slot, (ready_s, path) in list(self._under_way.items()):
            if ready_s <= now_s:
                del self._under_way[slot]
                if BROKEN in path:
                    failed[slot] = f"the adapter in {path} can't be read"
                else:
                    self._keys[slot] = model.adapter_key(path)
        return failed


class Constraints:
    """Constraints that are being compiled, by seq_id: when they will be ready."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._under_way: dict[int, float] = {}

    def prepare(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int]) -> list[int]:
        """See `Worker.prepare_grammars`."""
        for seq_id in dropped:
            self._under_way.pop(seq_id, None)
        now_s = time.monotonic()
        self._under_way |= {seq_id: now_s + self._chance.duration_s(_COMPILE_S) for seq_id in asked}
        self._under_way = {seq_id: ready_s for seq_id, ready_s in self._under_way.items() if ready_s > now_s}
        return list(self._under_way)
