"""Has the workers read LoRA adapters before the requests that use them are scheduled, so that no step has to wait.

Workers hold a fixed number of adapters, each in a place. An adapter whose place is needed for another one is dropped if
no unfinished request uses it: the one that hasn't been used for the longest time.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

from raycore.executor.base import Executor
from raycore.lora.request import LoRARequest
from raycore.pending import Pending

Answer = list[tuple[list[int], dict[int, str]]]
"""For each worker, what `prepare_adapters` returns."""


class HeldAdapter(NamedTuple):
    """An adapter that all workers hold."""

    place: int
    version: int
    """Another number each time that an adapter is read, because its files may have changed meanwhile."""


@dataclass(slots=True)
class _Adapter:
    held: HeldAdapter
    is_ready: bool = False
    users: set[int] = field(default_factory=set[int])
    """The seq_ids of the unfinished requests that use it."""


class AdaptersInUse:
    """Which adapters the workers hold, and which requests wait for theirs. No method waits for the workers."""

    def __init__(self, executor: Executor, num_places: int) -> None:
        self._executor = executor
        self._free = list(range(num_places - 1, -1, -1))
        self._adapters: OrderedDict[LoRARequest, _Adapter] = OrderedDict()
        """Those that have a place. The one that was used last is at the end."""
        self._asked: dict[int, LoRARequest] = {}
        """By seq_id: the adapters of unfinished requests."""
        self._waiting: dict[int, LoRARequest] = {}
        """By seq_id: those of requests that wait until their adapter is ready, or has a place. In order of arrival."""
        self._new: dict[int, LoRARequest] = {}
        """Adapters that haven't been sent to the workers yet, by place."""
        self._reading: dict[int, LoRARequest] = {}
        """Adapters that workers read, by place."""
        self._answer: Pending[Answer] | None = None
        self._versions = itertools.count(1)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __contains__(self, seq_id: int) -> bool:
        """Whether a request waits for its adapter."""
        return seq_id in self._waiting

    def add(self, seq_id: int, adapter: LoRARequest) -> None:
        """Let a request wait for its adapter. If the workers don't hold it, the next `take_done()` has them read it."""
        self._asked[seq_id] = self._waiting[seq_id] = adapter

    def drop(self, seq_id: int) -> None:
        """Note that a request has ended. Unknown seq_ids are ignored."""
        adapter = self._asked.pop(seq_id, None)
        self._waiting.pop(seq_id, None)
        if adapter is not None and adapter in self._adapters:
            self._adapters[adapter].users.discard(seq_id)

    def take_done(self) -> tuple[dict[int, HeldAdapter], dict[int, str]]:
        """Remove and return the requests whose adapters are ready, and those whose adapters can't be used, with the
        reason. By seq_id."""
        if not self._waiting:
            return {}, {}
        for seq_id, adapter in self._waiting.items():
            self._give_place(seq_id, adapter)
        failed = self._hear_from_workers()
        ready = {
            seq_id: self._adapters[adapter].held
            for seq_id, adapter in self._waiting.items()
            if adapter in self._adapters and self._adapters[adapter].is_ready
        }
        for seq_id in (*ready, *failed):
            self._waiting.pop(seq_id)
        return ready, failed

    def _give_place(self, seq_id: int, adapter: LoRARequest) -> None:
        """Note the use of an adapter. If it has no place, give it one, unless all others are in use."""
        if adapter not in self._adapters:
            place = self._find_place()
            if place is None:
                return
            self._adapters[adapter] = _Adapter(HeldAdapter(place, next(self._versions)))
            self._new[place] = adapter
        self._adapters[adapter].users.add(seq_id)
        self._adapters.move_to_end(adapter)

    def _find_place(self) -> int | None:
        if self._free:
            return self._free.pop()
        for adapter, own in self._adapters.items():
            if not own.users and own.is_ready:
                del self._adapters[adapter]
                return own.held.place
        return None

    def _hear_from_workers(self) -> dict[int, str]:
        """Ask the workers about the adapters that they read. Returns the requests whose adapters can't be used."""
        if self._answer is None and (self._new or self._reading):
            new, self._new = self._new, {}
            self._reading |= new
            self._answer = self._executor.collective_rpc("prepare_adapters", args=(new,), non_block=True)
        if self._answer is None or not self._answer.done():
            return {}
        answers, self._answer = self._answer.result(), None
        under_way = {place for places, _ in answers for place in places}
        errors = {place: error for _, failed in answers for place, error in failed.items()}
        failed: dict[int, str] = {}
        for place in [place for place in self._reading if place not in under_way]:
            adapter = self._reading.pop(place)
            if place not in errors:
                self._adapters[adapter].is_ready = True
                continue
            users = self._adapters.pop(adapter).users
            self._free.append(place)
            failed |= dict.fromkeys(users & self._waiting.keys(), errors[place])
        return failed
