"""The slots that workers have for LoRA adapters: which adapter is in each, and which ones are being read.

Knows nothing of requests and of what was added: its owner decides which adapters may make room for others.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from raycore.errors import InvalidAdapter, InvalidInput, RpcTimeout
from raycore.executor.base import Executor
from raycore.lora.request import LoRARequest
from raycore.rpc.pending import Pending
from raycore.system import Future, time

Answer = list[tuple[list[int], dict[int, str]]]
"""For each worker, what `prepare_adapters` returns."""

_POLL_INTERVAL_S = 0.002


class AdapterLoad(NamedTuple):
    """One load of an adapter by all workers."""

    slot: int
    load_id: int
    """Another number each time that an adapter is read, because its files may have changed meanwhile."""


class AdapterKey(NamedTuple):
    """What tells adapters apart, on one rank."""

    adapter: LoRARequest
    revision: int


@dataclass(slots=True)
class SlottedAdapter:
    """An adapter that has a slot."""

    load: AdapterLoad
    is_ready: bool = False
    """Whether all workers hold it."""
    is_awaited: bool = False
    """Whether the driver has asked for it, and hasn't decided yet whether it is added."""
    users: set[int] = field(default_factory=set[int])
    """The seq_ids of the unfinished requests that use it."""
    readers: list[Future[None]] = field(default_factory=list[Future[None]])
    """Completed when all workers hold it, or with an error."""


class Failure(NamedTuple):
    """An adapter that a worker couldn't read. It has no slot any more."""

    key: AdapterKey
    users: set[int]
    error: str
    is_told: bool
    """Whether somebody who waited for it has got the error."""


class AdapterSlots:
    """The adapters that have slots. Only `sleep()` and `wake()` wait for the workers."""

    def __init__(self, executor: Executor, num_adapters: int) -> None:
        """`num_adapters`: without the one for an adapter that replaces another."""
        self.num_adapters = num_adapters
        self.adapters: OrderedDict[AdapterKey, SlottedAdapter] = OrderedDict()
        """The one that was used last is at the end."""
        self._executor = executor
        self._free = list(range(num_adapters, -1, -1))
        self._new: dict[int, LoRARequest] = {}
        """Adapters that haven't been sent to the workers yet, by slot."""
        self._reading: dict[int, AdapterKey] = {}
        """Adapters that workers read, by slot."""
        self._dropped: set[int] = set()
        """Slots whose adapters the workers have yet to drop."""
        self._answer: Pending[Answer] | None = None
        self._is_asleep = False
        """Whether the workers read nothing, because their weights are asleep."""
        self._load_ids = itertools.count(1)

    @property
    def has_work(self) -> bool:
        """Whether the workers have something to read or to drop."""
        return not self._is_asleep and bool(self._new or self._reading or self._dropped)

    def read(self, key: AdapterKey, may_go: Callable[[AdapterKey], bool], *, is_replacement: bool = False) -> bool:
        """Give an adapter a slot, and have the workers read it. Returns False if there is no slot.

        Args:
            may_go: whether another adapter may make room. Only asked about adapters that no unfinished request uses.
            is_replacement: whether it may take the slot that there is in addition.
        """
        slot = self._find_slot(may_go, is_replacement)
        if slot is None:
            return False
        self.adapters[key] = SlottedAdapter(AdapterLoad(slot, next(self._load_ids)))
        self._new[slot] = key.adapter
        self._dropped.discard(slot)  # what it holds is replaced
        return True

    def _find_slot(self, may_go: Callable[[AdapterKey], bool], is_replacement: bool) -> int | None:
        if self._free and (is_replacement or len(self.adapters) < self.num_adapters):
            return self._free.pop()
        for key, own in self.adapters.items():
            if own.is_ready and not own.users and not own.is_awaited and may_go(key):
                self.forget(key)
                return self._free.pop()
        return None

    def when_read(self, key: AdapterKey) -> Future[None]:
        """A future that is done when all workers hold an adapter. It may raise InvalidAdapter or InvalidInput.

        Workers that are asleep read it when they wake up. This doesn't wait for that.
        """
        own, done = self.adapters[key], Future[None]()
        if own.is_ready or self._is_asleep:
            done.set_result(None)
        else:
            own.readers.append(done)
        return done

    def forget(self, key: AdapterKey) -> None:
        """Take an adapter's slot, and have the workers drop it. No request uses it."""
        own = self.adapters.pop(key)
        slot = own.load.slot
        for done in own.readers:
            done.set_exception(InvalidInput(f"adapter {key.adapter.lora_name!r} was removed while it was being read"))
        self._new.pop(slot, None)
        self._reading.pop(slot, None)
        self._dropped.add(slot)
        self._free.append(slot)

    def hear_from_workers(self) -> list[Failure]:
        """Ask the workers about the adapters that they read, and tell them what to read and drop.

        Returns: the adapters that can't be read.
        """
        if self._is_asleep:
            return []
        if self._answer is None and self.has_work:
            new, self._new = self._new, {}
            dropped, self._dropped = sorted(self._dropped), set()
            self._reading |= {own.load.slot: key for key, own in self.adapters.items() if own.load.slot in new}
            self._answer = self._executor.collective_rpc("prepare_adapters", args=(new, dropped), non_block=True)
        if self._answer is None or not self._answer.done():
            return []
        answers, self._answer = self._answer.result(), None
        under_way = {slot for slots, _ in answers for slot in slots}
        errors = {slot: error for _, failed in answers for slot, error in failed.items()}
        failures: list[Failure] = []
        for slot in [slot for slot in self._reading if slot not in under_way]:
            key = self._reading.pop(slot)
            if slot in errors:
                failures.append(self._fail(key, errors[slot]))
            else:
                own = self.adapters[key]
                own.is_ready = True
                _complete(own)
        return failures

    def _fail(self, key: AdapterKey, error: str) -> Failure:
        own = self.adapters[key]
        is_told = bool(own.readers)
        _complete(own, InvalidAdapter(error))
        self.forget(key)
        return Failure(key, own.users, error, is_told)

    def sleep(self, drops: Callable[[AdapterKey], bool]) -> None:
        """Have the workers read nothing until `wake()`. No step may run meanwhile.

        Args:
            drops: whether the workers drop an adapter, and read it again when they wake up. It keeps its slot.
        """
        self._is_asleep = True
        for key, own in self.adapters.items():
            _complete(
                own, InvalidInput("the engine fell asleep meanwhile: call wake_up() first") if own.is_awaited else None
            )
            if drops(key):
                own.is_ready = False
                self._new[own.load.slot] = key.adapter
        slots = sorted({*self._dropped, *(slot for slot in self._new)})
        if self._answer is not None:
            self._answer.result()
        self._answer = None
        self._new |= {slot: key.adapter for slot, key in self._reading.items()}
        self._reading.clear()
        self._dropped.clear()
        if slots:
            self._executor.collective_rpc("drop_adapters", args=(slots,))

    def wake(self, timeout_s: float) -> list[Failure]:
        """Have the workers read what was dropped, and what got a slot meanwhile. Waits for that.

        Returns: the adapters that can't be read.

        Raises:
            RpcTimeout: that took more than `timeout_s` seconds.
        """
        self._is_asleep = False
        failures: list[Failure] = []
        deadline_s = time.monotonic() + timeout_s
        while self.has_work:
            failures += self.hear_from_workers()
            if time.monotonic() > deadline_s:
                raise RpcTimeout(f"the workers haven't read {len(self._reading)} adapters within {timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)
        return failures


def _complete(adapter: SlottedAdapter, error: Exception | None = None) -> None:
    """Tell those who wait for an adapter that it is held, or why it isn't."""
    readers, adapter.readers = adapter.readers, []
    for done in readers:
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
