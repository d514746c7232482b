"""What a worker prepares in the background: adapters, which it reads, and constraints, which it compiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from raycore.lora.request import LoRARequest
from raycore.structured_outputs import StructuredOutputsParams
from raycore.system import Future, ThreadPoolExecutor, time
from simulation.worker import model
from simulation.worker.chance import Chance
from simulation.worker.compilations import note_compilation

_READ_S, _COMPILE_S = 0.05, 0.02
_SLOW_S, _SLOW_SHARE = 2.0, 0.3
"""How long some constraints take to be compiled. Those that come after them wait."""
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
    """Compiles constraints on a thread, one at a time. Outside of a world, that takes no time."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._under_way: dict[int, Future[None]] = {}
        """By seq_id."""
        self._thread: ThreadPoolExecutor | None = None
        """None: none was asked for yet."""

    def prepare(self, asked: Mapping[int, StructuredOutputsParams], dropped: Sequence[int]) -> list[int]:
        """See `Worker.prepare_grammars`."""
        for seq_id in dropped:
            if seq_id in self._under_way:
                self._under_way.pop(seq_id).cancel()
        for seq_id, constraint in asked.items():
            took_s = self._chance.duration_s(compile_s(self._chance))
            if took_s:
                self._thread = self._thread or ThreadPoolExecutor(1, "constraints")
                self._under_way[seq_id] = self._thread.submit(_compile, constraint, took_s)
        self._under_way = {seq_id: future for seq_id, future in self._under_way.items() if not future.done()}
        return list(self._under_way)


def compile_s(chance: Chance) -> float:
    """How long a constraint takes to be compiled, on average."""
    return _SLOW_S if chance.is_so(_SLOW_SHARE) else _COMPILE_S


def _compile(constraint: StructuredOutputsParams, took_s: float) -> None:
    note_compilation(constraint)
    time.sleep(took_s)
