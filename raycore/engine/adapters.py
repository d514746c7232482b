"""Has the workers read LoRA adapters before the requests that use them are scheduled, so that no step has to wait.

Workers hold a fixed number of adapters, each in a place. An adapter whose place is needed for another one is dropped if
no unfinished request uses it and it isn't pinned: the one that hasn't been used for the longest time. There is one more
place, for the new edition of an adapter that is being replaced, so that requests can finish with the old edition.

Adapters come in two ways: with the requests that use them, or because the driver has added them to the engine. A
request uses the added adapter with the number that it names, in its latest edition.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from raycore.errors import InvalidAdapter, InvalidInput, InvalidRequest, RpcTimeout
from raycore.executor.base import Executor
from raycore.lora.added import NONE_ADDED, ONLY_REQUESTED, AddedAdapter, AddedAdapters
from raycore.lora.request import LoRARequest
from raycore.pending import Pending

logger = logging.getLogger(__name__)

Answer = list[tuple[list[int], dict[int, str]]]
"""For each worker, what `prepare_adapters` returns."""

_POLL_INTERVAL_S = 0.002


class HeldAdapter(NamedTuple):
    """An adapter that all workers hold."""

    place: int
    version: int
    """Another number each time that an adapter is read, because its files may have changed meanwhile."""


class _Key(NamedTuple):
    """What tells adapters apart, on this rank."""

    adapter: LoRARequest
    edition: int


@dataclass(slots=True)
class _Adapter:
    held: HeldAdapter
    is_ready: bool = False
    is_awaited: bool = False
    """Whether the driver has asked for it, and hasn't decided yet whether it is added."""
    users: set[int] = field(default_factory=set[int])
    """The seq_ids of the unfinished requests that use it."""
    readers: list[Future[None]] = field(default_factory=list[Future[None]])
    """Completed when all workers hold it, or with an error."""


class _Asked(NamedTuple):
    """What a request asks for."""

    adapter: LoRARequest
    edition: int | None
    """The edition with which the request has begun on another rank. None: it hasn't begun."""


class AdaptersInUse:
    """Which adapters the workers hold, and which requests wait for theirs. Only `wake()` waits for the workers."""

    def __init__(self, executor: Executor, num_places: int) -> None:
        """`num_places`: without the one for a new edition."""
        self._executor = executor
        self._num_places = num_places
        self._free = list(range(num_places, -1, -1))
        self._added = NONE_ADDED
        self._added_by_id: dict[int, AddedAdapter] = {}
        self._adapters: OrderedDict[_Key, _Adapter] = OrderedDict()
        """Those that have a place. The one that was used last is at the end."""
        self._used: dict[int, _Key] = {}
        """By seq_id: the adapters, with a place, of unfinished requests."""
        self._waiting: dict[int, _Asked] = {}
        """By seq_id: those of requests that wait until their adapter is ready, or has a place. In order of arrival."""
        self._new: dict[int, LoRARequest] = {}
        """Adapters that haven't been sent to the workers yet, by place."""
        self._reading: dict[int, _Key] = {}
        """Adapters that workers read, by place."""
        self._dropped: set[int] = set()
        """Places whose adapters the workers have yet to drop."""
        self._answer: Pending[Answer] | None = None
        self._is_asleep = False
        """Whether the workers read nothing, because their weights are asleep."""
        self._failed: dict[int, str] = {}
        """By seq_id: why requests can't go on. `take_done()` returns them."""
        self._versions = itertools.count(1)

    def __bool__(self) -> bool:
        """Whether a request waits, or the workers have something to do."""
        return bool(self._waiting or self._failed) or (not self._is_asleep and self._is_under_way)

    @property
    def _is_under_way(self) -> bool:
        return bool(self._new or self._reading or self._dropped)

    def __contains__(self, seq_id: int) -> bool:
        """Whether a request waits for its adapter."""
        return seq_id in self._waiting

    # ---- requests

    def check(self, adapter: LoRARequest) -> None:
        """Raise InvalidRequest if the adapter's number belongs to another one that was added."""
        added = self._added_by_id.get(adapter.lora_int_id)
        if added is not None and added.adapter.lora_name != adapter.lora_name:
            raise InvalidRequest(
                f"lora_request={adapter.lora_name!r}: lora_int_id={adapter.lora_int_id} is the number of "
                f"{added.adapter.lora_name!r}, which was added: give another number"
            )

    def add(self, seq_id: int, adapter: LoRARequest, edition: int | None = None) -> None:
        """Let a request wait for its adapter. If the workers don't hold it, the next `take_done()` has them read it.

        `edition`: the one with which the request has begun on another rank. None: it hasn't begun.
        """
        self._waiting[seq_id] = _Asked(adapter, edition)

    def drop(self, seq_id: int) -> None:
        """Note that a request has ended. Unknown seq_ids are ignored."""
        self._waiting.pop(seq_id, None)
        self._failed.pop(seq_id, None)
        key = self._used.pop(seq_id, None)
        if key is not None:
            self._adapters[key].users.discard(seq_id)
            self._drop_if_over(key)

    def edition(self, seq_id: int) -> int | None:
        """The edition that an unfinished request uses; None if it uses no adapter, or waits for it."""
        key = self._used.get(seq_id)
        return None if key is None else key.edition

    def take_done(self) -> tuple[dict[int, HeldAdapter], dict[int, str]]:
        """Remove and return the requests whose adapters are ready, and those whose adapters can't be used, with the
        reason. By seq_id."""
        if not self:
            return {}, {}
        for seq_id, asked in self._waiting.items():
            if seq_id not in self._used:
                self._give_place(seq_id, asked)
        self._hear_from_workers()
        ready = {
            seq_id: self._adapters[key].held
            for seq_id in self._waiting
            if (key := self._used.get(seq_id)) is not None and self._adapters[key].is_ready
        }
        failed, self._failed = self._failed, {}
        for seq_id in (*ready, *failed):
            self._waiting.pop(seq_id, None)
        return ready, failed

    def _give_place(self, seq_id: int, asked: _Asked) -> None:
        """Note the use of an adapter. If it has no place, give it one, unless all others are in use."""
        key = self._key_of(asked)
        if key is None:
            self._failed[seq_id] = (
                f"lora_request={asked.adapter.lora_name!r}: the adapter was replaced after the request had begun, and "
                "the rank that had the files of before is gone"
            )
            return
        if key not in self._adapters and not self._read(key):
            if self._num_pinned >= self._num_places and not self._is_pinned(key):
                self._failed[seq_id] = (
                    f"lora_request={asked.adapter.lora_name!r}: {self._no_place} Unpin an adapter by removing it, or "
                    "raise max_cpu_loras"
                )
            return
        self._adapters[key].users.add(seq_id)
        self._adapters.move_to_end(key)
        self._used[seq_id] = key

    def _key_of(self, asked: _Asked) -> _Key | None:
        """What a request uses. None: it has begun with what can't be read any more."""
        adapter, edition = asked
        added = self._added_by_id.get(adapter.lora_int_id)
        current = _Key(_plain(adapter), ONLY_REQUESTED) if added is None else _key_of_added(added)
        if edition is None or edition == current.edition:
            return current
        for key in self._adapters:
            if key.edition == edition and key.adapter.lora_int_id == adapter.lora_int_id:
                return key
        return None if added is not None and added.is_replacement else _Key(_plain(adapter), ONLY_REQUESTED)

    # ---- what the driver adds

    def begin(self, adapter: AddedAdapter) -> Future[None]:
        """Have the workers read an adapter that will be added, or dropped by `give_up()`.

        Returns: a future that is done when all workers hold the adapter. It may raise:
            InvalidAdapter: a worker can't read it.
            InvalidInput: there is no place for it.
        """
        key, done = _key_of_added(adapter), Future[None]()
        if key not in self._adapters and not self._read(key, is_replacement=self._holds(adapter.adapter.lora_int_id)):
            done.set_exception(InvalidInput(self._no_place))
            return done
        self._adapters[key].is_awaited = True
        self._await(key, done)
        return done

    def give_up(self, edition: int) -> None:
        """Drop what `begin()` has begun to read."""
        for key in [key for key, own in self._adapters.items() if key.edition == edition and own.is_awaited]:
            self._adapters[key].is_awaited = False
            self._drop_if_over(key)

    def follow(self, added: AddedAdapters, wanted: Sequence[int]) -> Future[dict[int, str]]:
        """Take the list of adapters that were added. Has no effect if a later one came before.

        Args:
            wanted: the numbers of those that the workers should hold.

        Returns: a future that is done when the workers hold them, as far as possible. Its result is why some can't be
            held, by number.
        """
        done = Future[dict[int, str]]()
        if added.number < self._added.number:
            done.set_result({})
            return done
        self._added, self._added_by_id = added, {each.adapter.lora_int_id: each for each in added.adapters}
        for key in list(self._adapters):
            if self._is_current(key):
                self._adapters[key].is_awaited = False
            self._drop_if_over(key)
        failed: dict[int, str] = {}
        reading: dict[int, Future[None]] = {}
        for each in map(self._added_by_id.get, wanted):
            if each is None:
                continue
            key, lora_id = _key_of_added(each), each.adapter.lora_int_id
            if key in self._adapters or self._read(key):
                self._await(key, reading.setdefault(lora_id, Future[None]()))
            else:
                failed[lora_id] = self._no_place
        _when_all_are_done(reading, failed, done)
        return done

    def _await(self, key: _Key, done: Future[None]) -> None:
        own = self._adapters[key]
        # workers that are asleep read it when they wake up
        if own.is_ready or self._is_asleep:
            done.set_result(None)
        else:
            own.readers.append(done)

    def _holds(self, lora_id: int) -> bool:
        return any(key.adapter.lora_int_id == lora_id for key in self._adapters)

    # ---- sleep

    def sleep(self, *, drops: bool) -> None:
        """Have the workers read nothing until `wake()`. No step may run meanwhile.

        Args:
            drops: drop adapters, except for old editions that unfinished requests use: these can't be read again.
        """
        self._is_asleep = True
        if not drops:
            return
        for key, own in self._adapters.items():
            if self._is_readable(key) or not own.is_ready:
                own.is_ready = False
                self._new[own.held.place] = key.adapter
        if self._answer is not None:
            self._answer.result()
        self._answer = None
        self._reading.clear()
        places, self._dropped = sorted({*self._new, *self._dropped}), set()
        if places:
            self._executor.collective_rpc("drop_adapters", args=(places,))

    def wake(self, timeout_s: float) -> None:
        """Have the workers read what was dropped, and what was added meanwhile. Waits for that.

        Raises:
            RpcTimeout: that took more than `timeout_s` seconds.
        """
        self._is_asleep = False
        deadline_s = time.monotonic() + timeout_s
        while self._is_under_way:
            self._hear_from_workers()
            if time.monotonic() > deadline_s:
                raise RpcTimeout(f"the workers haven't read {len(self._reading)} adapters within {timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)

    # ---- places

    def _read(self, key: _Key, *, is_replacement: bool = False) -> bool:
        """Give an adapter a place, and have the workers read it. Returns False if there is no place."""
        place = self._find_place(is_replacement)
        if place is None:
            return False
        self._adapters[key] = _Adapter(HeldAdapter(place, next(self._versions)))
        self._new[place] = key.adapter
        self._dropped.discard(place)  # what it holds is replaced
        return True

    def _find_place(self, is_replacement: bool) -> int | None:
        if self._free and (is_replacement or len(self._adapters) < self._num_places):
            return self._free.pop()
        for key, own in self._adapters.items():
            if own.is_ready and not own.users and not own.is_awaited and not self._is_pinned(key):
                self._forget(key)
                return self._free.pop()
        return None

    def _drop_if_over(self, key: _Key) -> None:
        """Drop an adapter that was removed or replaced, and that nobody uses any more."""
        own = self._adapters[key]
        if key.edition == ONLY_REQUESTED and self._added_by_id.get(key.adapter.lora_int_id) is None:
            return  # others may ask for it
        if not (own.users or own.is_awaited or self._is_current(key)):
            self._forget(key)

    def _forget(self, key: _Key) -> None:
        own = self._adapters.pop(key)
        place = own.held.place
        for done in own.readers:
            done.set_exception(InvalidInput(f"adapter {key.adapter.lora_name!r} was removed while it was being read"))
        self._new.pop(place, None)
        self._reading.pop(place, None)
        self._dropped.add(place)
        self._free.append(place)

    def _is_current(self, key: _Key) -> bool:
        """Whether new requests use this edition."""
        added = self._added_by_id.get(key.adapter.lora_int_id)
        return key.edition == (ONLY_REQUESTED if added is None else added.edition)

    def _is_readable(self, key: _Key) -> bool:
        """Whether its files are still there, as far as is known."""
        added = self._added_by_id.get(key.adapter.lora_int_id)
        return self._is_current(key) or added is None or not added.is_replacement

    def _is_pinned(self, key: _Key) -> bool:
        added = self._added_by_id.get(key.adapter.lora_int_id)
        return added is not None and added.is_pinned and added.edition == key.edition

    @property
    def _num_pinned(self) -> int:
        return sum(each.is_pinned for each in self._added.adapters)

    @property
    def _no_place(self) -> str:
        num_pinned = self._num_pinned
        return (
            f"all max_cpu_loras={self._num_places} places for adapters are taken: {num_pinned} are pinned, and the "
            "others are used by unfinished requests."
        )

    # ---- workers

    def _hear_from_workers(self) -> None:
        """Ask the workers about the adapters that they read, and tell them what to read and drop."""
        if self._is_asleep:
            return
        if self._answer is None and self._is_under_way:
            new, self._new = self._new, {}
            dropped, self._dropped = sorted(self._dropped), set()
            self._reading |= {own.held.place: key for key, own in self._adapters.items() if own.held.place in new}
            self._answer = self._executor.collective_rpc("prepare_adapters", args=(new, dropped), non_block=True)
        if self._answer is None or not self._answer.done():
            return
        answers, self._answer = self._answer.result(), None
        under_way = {place for places, _ in answers for place in places}
        errors = {place: error for _, failed in answers for place, error in failed.items()}
        for place in [place for place in self._reading if place not in under_way and place not in self._new]:
            key = self._reading.pop(place)
            own = self._adapters[key]
            if place in errors:
                self._note_failure(key, errors[place])
                continue
            own.is_ready = True
            readers, own.readers = own.readers, []
            for done in readers:
                done.set_result(None)

    def _note_failure(self, key: _Key, error: str) -> None:
        own = self._adapters[key]
        readers, own.readers = own.readers, []
        if key.edition != ONLY_REQUESTED and not readers:
            logger.warning("adapter %r, which was added, can't be read any more: %s", key.adapter.lora_name, error)
        for seq_id in own.users:
            self._failed[seq_id] = error
            del self._used[seq_id]
        own.users = set()
        self._forget(key)
        for done in readers:
            done.set_exception(InvalidAdapter(error))


def _plain(adapter: LoRARequest) -> LoRARequest:
    return msgspec.structs.replace(adapter, load_inplace=False) if adapter.load_inplace else adapter


def _key_of_added(added: AddedAdapter) -> _Key:
    return _Key(added.adapter, added.edition)


def _when_all_are_done(reading: dict[int, Future[None]], failed: dict[int, str], done: Future[dict[int, str]]) -> None:
    """Complete `done` with `failed` and the errors of `reading`, when all of these are done. On the loop's thread."""
    missing = set(reading)
    if not missing:
        done.set_result(failed)

    def note(lora_id: int, each: Future[None]) -> None:
        error = each.exception()
        if error is not None:
            failed[lora_id] = str(error)
        missing.discard(lora_id)
        if not missing:
            done.set_result(failed)

    for lora_id, each in list(reading.items()):
        each.add_done_callback(lambda each, lora_id=lora_id: note(lora_id, each))
