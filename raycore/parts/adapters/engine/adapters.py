"""Has the workers read LoRA adapters before the requests that use them are scheduled, so that no step has to wait.

Workers hold a fixed number of adapters, each in a slot (`adapter_slots`). If another one needs a slot, the adapter
makes room that hasn't been used for the longest time, but none that is pinned or that an unfinished request uses. There
is one more slot, for the new revision of an adapter that is being replaced, so that requests can finish with the old
revision.

Adapters come in two ways: with the requests that use them, or because the driver has added them to the engine. A
request uses the added adapter with the number that it names, in its latest revision.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from raycore.errors import InvalidInput, InvalidRequest
from raycore.executor.base import Executor
from raycore.lora.request import LoRARequest
from raycore.messages import AdapterUse
from raycore.parts.adapters.engine.slots import AdapterKey, AdapterLoad, AdapterSlots, Failure
from raycore.parts.adapters.values import NONE_ADDED, ONLY_REQUESTED, AddedAdapter, AddedAdapters
from raycore.system import Future

logger = logging.getLogger(__name__)


class _Asked(NamedTuple):
    """What a request asks for."""

    adapter: LoRARequest
    revision: int | None
    """The revision with which the request has begun on another rank. None: it hasn't begun."""


class AdaptersInUse:
    """Which adapters the workers hold, and which requests wait. Only `sleep()` and `wake()` wait for the workers."""

    def __init__(self, executor: Executor, num_adapters: int) -> None:
        """`num_adapters`: without the one for a new revision."""
        self._slots = AdapterSlots(executor, num_adapters)
        self._adapters = self._slots.adapters
        self._added = NONE_ADDED
        self._added_by_id: dict[int, AddedAdapter] = {}
        self._used: dict[int, AdapterKey] = {}
        """By seq_id: the adapters, with a slot, of unfinished requests."""
        self._waiting: dict[int, _Asked] = {}
        """By seq_id: those of requests that wait until their adapter is ready, or has a slot. In order of arrival."""
        self._failed: dict[int, str] = {}
        """By seq_id: why requests can't go on. `take_done()` returns them."""
        self._begun: set[int] = set()
        """The seq_ids in `_used` whose requests have begun."""
        self._use: AdapterUse | None = None
        """What `use()` returns; None if it has changed."""

    def __bool__(self) -> bool:
        """Whether a request waits, or the workers have something to do."""
        return bool(self._waiting or self._failed) or self._slots.has_work

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

    def add(self, seq_id: int, adapter: LoRARequest, revision: int | None = None) -> None:
        """Let a request wait for its adapter. If the workers don't hold it, the next `take_done()` has them read it.

        `revision`: the one with which the request has begun on another rank. None: it hasn't begun.
        """
        self._waiting[seq_id] = _Asked(adapter, revision)
        self._use = None

    def note_begun(self, seq_ids: Iterable[int]) -> None:
        """Note which requests have begun. Those without adapters are ignored."""
        own = [seq_id for seq_id in seq_ids if seq_id in self._used]
        if own:
            self._begun.update(own)
            self._use = None

    def drop(self, seq_id: int) -> None:
        """Note that a request has ended. Unknown seq_ids are ignored."""
        self._waiting.pop(seq_id, None)
        self._failed.pop(seq_id, None)
        self._begun.discard(seq_id)
        self._use = None
        key = self._used.pop(seq_id, None)
        if key is not None:
            self._adapters[key].users.discard(seq_id)
            self._drop_if_over(key)

    def revision(self, seq_id: int) -> int | None:
        """The revision that an unfinished request uses; None if it uses no adapter, or waits for it."""
        key = self._used.get(seq_id)
        return None if key is None else key.revision

    def use(self) -> AdapterUse:
        """Return the names of the adapters of running and of waiting requests, in alphabetical order."""
        if self._use is None:
            running = {self._used[seq_id].adapter.lora_name for seq_id in self._begun}
            waiting = {asked.adapter.lora_name for asked in self._waiting.values()}
            waiting |= {key.adapter.lora_name for seq_id, key in self._used.items() if seq_id not in self._begun}
            self._use = AdapterUse(tuple(sorted(running)), tuple(sorted(waiting)))
        return self._use

    def take_done(self) -> tuple[dict[int, AdapterLoad], dict[int, str]]:
        """Remove and return the requests whose adapters are ready, and those whose adapters can't be used, with the
        reason. By seq_id."""
        if not self:
            return {}, {}
        for seq_id, asked in self._waiting.items():
            if seq_id not in self._used:
                self._give_slot(seq_id, asked)
        self._note(self._slots.hear_from_workers())
        ready = {
            seq_id: self._adapters[key].load
            for seq_id in self._waiting
            if (key := self._used.get(seq_id)) is not None and self._adapters[key].is_ready
        }
        failed, self._failed = self._failed, {}
        for seq_id in (*ready, *failed):
            self._waiting.pop(seq_id, None)
        return ready, failed

    def _give_slot(self, seq_id: int, asked: _Asked) -> None:
        """Note the use of an adapter. If it has no slot, give it one, unless all others are in use."""
        key = self._key_of(asked)
        if key is None:
            self._failed[seq_id] = (
                f"lora_request={asked.adapter.lora_name!r}: the adapter was replaced after the request had begun, and "
                "the rank that had the files of before is gone"
            )
            return
        if key not in self._adapters and not self._read(key):
            if self._num_pinned >= self._slots.num_adapters and not self._is_pinned(key):
                self._failed[seq_id] = (
                    f"lora_request={asked.adapter.lora_name!r}: {self._no_slot} Unpin an adapter by removing it, or "
                    "raise max_cpu_loras"
                )
            return
        self._adapters[key].users.add(seq_id)
        self._adapters.move_to_end(key)
        self._used[seq_id] = key

    def _key_of(self, asked: _Asked) -> AdapterKey | None:
        """What a request uses. None: it has begun with what can't be read any more."""
        adapter, revision = asked
        added = self._added_by_id.get(adapter.lora_int_id)
        current = AdapterKey(_plain(adapter), ONLY_REQUESTED) if added is None else _key_of_added(added)
        if revision is None or revision == current.revision:
            return current
        for key in self._adapters:
            if key.revision == revision and key.adapter.lora_int_id == adapter.lora_int_id:
                return key
        return None if added is not None and added.is_replacement else AdapterKey(_plain(adapter), ONLY_REQUESTED)

    # ---- what the driver adds

    def begin(self, adapter: AddedAdapter) -> Future[None]:
        """Have the workers read an adapter that will be added, or dropped by `give_up()`.

        Returns: a future that is done when all workers hold the adapter. It may raise:
            InvalidAdapter: a worker can't read it.
            InvalidInput: there is no slot for it.
        """
        key, done = _key_of_added(adapter), Future[None]()
        if key not in self._adapters and not self._read(key, is_replacement=self._has(adapter.adapter.lora_int_id)):
            done.set_exception(InvalidInput(self._no_slot))
            return done
        self._adapters[key].is_awaited = True
        return self._slots.when_read(key)

    def give_up(self, revision: int) -> None:
        """Drop what `begin()` has begun to read."""
        for key in [key for key, own in self._adapters.items() if key.revision == revision and own.is_awaited]:
            self._adapters[key].is_awaited = False
            self._drop_if_over(key)

    def sync(self, added: AddedAdapters, wanted: Sequence[int]) -> Future[dict[int, str]]:
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
                reading[lora_id] = self._slots.when_read(key)
            else:
                failed[lora_id] = self._no_slot
        _when_all_are_done(reading, failed, done)
        return done

    def _has(self, lora_id: int) -> bool:
        return any(key.adapter.lora_int_id == lora_id for key in self._adapters)

    # ---- sleep

    def sleep(self, *, drops: bool) -> None:
        """Have the workers read nothing until `wake()`. No step may run meanwhile.

        Args:
            drops: drop adapters, and read them again when the workers wake up. Not what was removed or replaced, and is
                still used: it may be impossible to read.
        """
        self._slots.sleep(lambda key: drops and self._is_current(key))

    def wake(self, timeout_s: float) -> None:
        """Have the workers read what was dropped, and what was added meanwhile. Waits for that.

        Raises:
            RpcTimeout: that took more than `timeout_s` seconds.
        """
        self._note(self._slots.wake(timeout_s))

    # ---- which adapters stay

    def _read(self, key: AdapterKey, *, is_replacement: bool = False) -> bool:
        return self._slots.read(key, lambda other: not self._is_pinned(other), is_replacement=is_replacement)

    def _note(self, failures: Sequence[Failure]) -> None:
        for key, users, error, is_told in failures:
            if key.revision != ONLY_REQUESTED and not is_told:
                logger.warning("adapter %r, which was added, can't be read any more: %s", key.adapter.lora_name, error)
            for seq_id in users:
                self._failed[seq_id] = error
                del self._used[seq_id]
                self._begun.discard(seq_id)

    def _drop_if_over(self, key: AdapterKey) -> None:
        """Drop an adapter that was removed or replaced, and that nobody uses any more."""
        own = self._adapters[key]
        if key.revision == ONLY_REQUESTED and self._added_by_id.get(key.adapter.lora_int_id) is None:
            return  # others may ask for it
        if not (own.users or own.is_awaited or self._is_current(key)):
            self._slots.forget(key)

    def _is_current(self, key: AdapterKey) -> bool:
        """Whether new requests use this revision."""
        added = self._added_by_id.get(key.adapter.lora_int_id)
        return key.revision == (ONLY_REQUESTED if added is None else added.revision)

    def _is_pinned(self, key: AdapterKey) -> bool:
        added = self._added_by_id.get(key.adapter.lora_int_id)
        return added is not None and added.is_pinned and added.revision == key.revision

    @property
    def _num_pinned(self) -> int:
        return sum(each.is_pinned for each in self._added.adapters)

    @property
    def _no_slot(self) -> str:
        return (
            f"all max_cpu_loras={self._slots.num_adapters} slots for adapters are taken: {self._num_pinned} are "
            "pinned, and the others are used by unfinished requests."
        )


def _plain(adapter: LoRARequest) -> LoRARequest:
    return msgspec.structs.replace(adapter, load_inplace=False) if adapter.load_inplace else adapter


def _key_of_added(added: AddedAdapter) -> AdapterKey:
    return AdapterKey(added.adapter, added.revision)


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
