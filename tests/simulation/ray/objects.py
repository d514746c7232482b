"""Results of calls: refs, generators of refs, and waiting for both."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ray.core.generated.common_pb2 import ErrorType
from ray.exceptions import (
    GetTimeoutError,
    ObjectReconstructionFailedError,
    ObjectRefStreamEndOfStreamError,
    OwnerDiedError,
    RayError,
    RayTaskError,
)

from simulation.ray.errors import Error
from simulation.ray.messages import Packed, note, noted
from simulation.world import kernel
from simulation.world.futures import Future
from simulation.world.threads import world

if TYPE_CHECKING:
    from simulation.ray.nodes import Node
    from simulation.ray.workers import Worker

_LONGEST_S = 1e6
"""Ray's `wait` without a time-out."""
_MOST_INLINE = 100 << 10
"""Larger values, in bytes, stay on the node where they were made until they are asked for."""
_POLL_S = 0.1


class Awaited:
    """Something that threads wait for."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[kernel.Thread] = []

    @property
    def is_ready(self) -> bool:
        raise NotImplementedError

    def fetch(self) -> bool:
        return self.is_ready

    def wake(self) -> None:
        waiting, self.waiting = self.waiting, []
        for thread in waiting:
            world().unpark(thread)


_numbers = itertools.count(1)


class Entry(Awaited):
    """A value that a process owns, once it is there."""

    __slots__ = ("_heard_by", "_is_ready", "error", "held_on", "number", "owner", "value", "when_lost")

    def __init__(self, owner: Worker) -> None:
        super().__init__()
        self.owner = owner
        self.number = next(_numbers)
        self.value: Packed | None = None
        self.error: Error | None = None
        self.held_on: Node | None = None
        """The node that has the only copy of a large value, until it is fetched."""
        self.when_lost: Callable[[], Error | None] = lambda: None
        """Why it is lost with the node. None: nothing special."""
        self._is_ready = False
        self._heard_by: list[Callable[[], object]] = []

    @property
    def is_ready(self) -> bool:
        return self._is_ready

    def resolve(self, value: Packed | None, error: Error | None = None, made_on: Node | None = None) -> None:
        """`made_on`: the node where the value was made."""
        if self._is_ready:
            return
        self.value, self.error, self._is_ready = value, error, True
        if value is not None and value.size > _MOST_INLINE and made_on is not self.owner.node:
            self.held_on = made_on
        self.wake()
        heard_by, self._heard_by = self._heard_by, []
        for hear in heard_by:
            hear()

    def when_ready(self, hear: Callable[[], object]) -> None:
        if self._is_ready:
            hear()
        else:
            self._heard_by.append(hear)

    def fetch(self) -> bool:
        """Whether the value, or the error, is in the owner's process."""
        node = self.held_on
        if node is not None and node.is_lost:
            if node.is_alive:
                return False  # it is asked for the value until Ray takes it for dead
            self.error = self.when_lost() or self._reconstruction_failed
        if self._is_ready:
            self.held_on = None
        return self._is_ready

    def _reconstruction_failed(self) -> RayError:
        ref, reason = self.number.to_bytes(28, "big").hex(), ErrorType.OBJECT_UNRECONSTRUCTABLE_RETRIES_DISABLED
        return ObjectReconstructionFailedError(ref, reason)

    def get(self) -> Any:
        """A copy of the value, which has to be ready. Raises as `ray.get` does."""
        if self.error is not None:
            raise self._raised(self.error())
        return None if self.value is None else self.value.unpack()

    @staticmethod
    def _raised(error: BaseException) -> BaseException:
        return error.as_instanceof_cause() if isinstance(error, RayTaskError) else error

    def outcome(self) -> tuple[Any, BaseException | None]:
        try:
            return self.get(), None
        except Exception as error:
            return None, error


class ObjectRef:
    """The ref of a result."""

    __slots__ = ("__weakref__", "_entry")

    def __init__(self, entry: Entry) -> None:
        self._entry = entry

    @classmethod
    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __hash__(self) -> int:
        return self._entry.number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectRef) and other._entry is self._entry

    def __repr__(self) -> str:
        return "ObjectRef(…)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _borrowed, (note(self._entry),)

    def binary(self) -> bytes:
        return self._entry.number.to_bytes(28, "big")

    def hex(self) -> str:
        return self.binary().hex()

    @property
    def awaited(self) -> Awaited:
        return self._entry

    def future(self) -> Future:
        """A future that gets the result on a thread of Ray's."""
        future, entry, worker = Future(), self._entry, here()

        def pass_on(_: ObjectRef) -> None:
            value, error = entry.outcome()
            if error is None:
                future.set_result(value)
            else:
                future.set_exception(error)

        entry.when_ready(partial(worker.call_back, partial(pass_on, self)))
        return future


def _borrowed(place: int) -> ObjectRef:
    """A ref that another process owns: its value comes later than there, and never if that process ends before."""
    entry, worker = noted(place), here()
    if entry.owner is worker:
        return ObjectRef(entry)
    own, cluster = Entry(worker), worker.cluster

    def fetch() -> None:
        cluster.world.call_later(cluster.delays.network(), lambda: own.resolve(entry.value, entry.error))

    entry.when_ready(fetch)
    if not entry.is_ready:
        ref = own.number.to_bytes(28, "big").hex()
        entry.owner.process.on_end.append(
            lambda _: cluster.world.call_later(
                cluster.delays.notice(), lambda: own.resolve(None, lambda: OwnerDiedError(ref, b"", ""))
            )
        )
    return ObjectRef(own)


class Stream(Awaited):
    """What a caller has received of a call that yields."""

    __slots__ = ("expected", "is_over", "items")

    def __init__(self) -> None:
        super().__init__()
        self.items: deque[Entry] = deque()
        self.is_over = False
        self.expected: Entry | None = None
        """The next item, if somebody has asked for its ref before it came."""

    @property
    def is_ready(self) -> bool:
        return bool(self.items) or self.is_over

    def add(self, entry: Entry) -> None:
        if not self.is_over:
            self.items.append(entry)
            expected, self.expected = self.expected, None
            if expected is not None:
                entry.when_ready(lambda: expected.resolve(entry.value, entry.error))
            self.wake()

    def end(self) -> None:
        self.is_over = True
        if self.expected is not None:
            self.expected.resolve(None, ObjectRefStreamEndOfStreamError)
        self.wake()

    def peek(self, worker: Worker) -> ObjectRef:
        """The ref of the next item, which may not have come."""
        if self.items:
            return ObjectRef(self.items[0])
        if self.expected is None:
            self.expected = Entry(worker)
            if self.is_over:
                self.expected.resolve(None, ObjectRefStreamEndOfStreamError)
        return ObjectRef(self.expected)


class ObjectRefGenerator:
    """Yields a ref for each item that a method has yielded, as soon as it is available."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    @property
    def awaited(self) -> Awaited:
        return self._stream

    @property
    def _generator_ref(self) -> Stream:
        return self._stream

    def __iter__(self) -> ObjectRefGenerator:
        return self

    def __next__(self) -> ObjectRef:
        world().pause()
        stream = self._stream
        while not stream.items:
            if stream.is_over:
                raise StopIteration
            wait_for([stream], None, "the next item of a stream")
        return ObjectRef(stream.items.popleft())


def wait_for(things: Sequence[Awaited], timeout_s: float | None, what: str) -> None:
    """Wait until one of several things that aren't ready may be, at most `timeout_s` seconds."""
    here = world()
    thread = here.current
    assert thread is not None
    for thing in things:
        thing.waiting.append(thread)
    try:
        here.park(what, timeout_s)
    finally:
        for thing in things:
            if thread in thing.waiting:
                thing.waiting.remove(thread)


def get(refs: Any, *, timeout: float | None = None) -> Any:
    here_ = world()
    here_.pause()
    here()
    until_s = None if timeout is None else here_.now_s + timeout
    if isinstance(refs, ObjectRef):
        _wait_for_all([refs._entry], until_s)
        return refs._entry.get()
    if not isinstance(refs, list):
        raise ValueError(f"Invalid type of object refs, {type(refs)}, is given. 'object_refs' must either be an object")
    _wait_for_all([ref._entry for ref in refs], until_s)
    return [ref._entry.get() for ref in refs]


def _wait_for_all(entries: Sequence[Entry], until_s: float | None) -> None:
    """Raises the first error that is there, without waiting for the rest."""
    while missing := [entry for entry in entries if not entry.fetch()]:
        failed = next((entry for entry in entries if entry.is_ready and entry.error is not None), None)
        if failed is not None:
            failed.get()
        left_s = None if until_s is None else until_s - world().now_s
        if left_s is not None and left_s <= 0:
            raise GetTimeoutError("Get timed out: some object(s) not ready.")
        if any(entry.is_ready for entry in missing):
            left_s = _POLL_S if left_s is None else min(left_s, _POLL_S)
        wait_for(missing, left_s, "a result" if len(entries) == 1 else "results")


def wait(
    refs: list[Any], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Any], list[Any]]:
    if not isinstance(refs, list):
        raise TypeError(f"wait() expected a list of ray.ObjectRef or ray.ObjectRefGenerator, got {type(refs)}")
    if timeout is not None and timeout < 0:
        raise ValueError(f"The 'timeout' argument must be nonnegative. Received {timeout}")
    if not refs:
        return [], []
    if len({id(ref.awaited) for ref in refs}) < len(refs):
        raise ValueError("Wait requires a list of unique refs.")
    if not 0 < num_returns <= len(refs):
        raise ValueError(f"num_returns={num_returns} isn't from 1 to the number of refs, {len(refs)}")
    here_ = world()
    here_.pause()
    worker = here()
    until_s = here_.now_s + (_LONGEST_S if timeout is None else int(timeout * 1000) / 1000)
    things = [ref.awaited for ref in refs]
    while True:
        ready = [index for index, thing in enumerate(things) if thing.is_ready]
        left_s = until_s - here_.now_s
        if len(ready) >= num_returns or left_s <= 0:
            break
        wait_for([thing for thing in things if not thing.is_ready], left_s, "results")
    if len(ready) > num_returns:  # any of those that are ready
        ready = sorted(worker.cluster.draws.sample(ready, num_returns))
    if fetch_local:
        for index in ready:
            things[index].fetch()
    chosen = dict.fromkeys(ready)
    return [refs[index] for index in chosen], [ref for index, ref in enumerate(refs) if index not in chosen]


def here() -> Worker:
    """Ray's side of the process that runs."""
    return world().systems["ray"].here()
