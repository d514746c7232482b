"""Calls of actors: from the caller's order, over the network, to the actor's threads, and back."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from simulation.ray import errors
from simulation.ray.errors import Error
from simulation.ray.messages import Boundary, Message, Packed
from simulation.ray.objects import Entry, ObjectRef, Stream

if TYPE_CHECKING:
    from simulation.ray.actors import Actor, Incarnation
    from simulation.ray.workers import Worker

_WAIT_FOR_REASON_S = 1.0
"""For how long a call whose connection broke waits until the control store says why."""


class Dependency:
    """Stands in a call's arguments for a ref, whose value is passed instead."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


class Arguments:
    """A call's arguments, copied when it is made."""

    __slots__ = ("_packed", "_plain", "dependencies", "size")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.dependencies: list[Entry] = []
        packed = [Packed(self._replaced(value)) for value in args]
        self._packed = packed
        self._plain = {name: Packed(self._replaced(value)) for name, value in kwargs.items()}
        self.size = sum(value.size for value in packed) + sum(value.size for value in self._plain.values())

    def _replaced(self, value: Any) -> Any:
        if not isinstance(value, ObjectRef):
            return value
        self.dependencies.append(value._entry)
        return Dependency(len(self.dependencies) - 1)

    @property
    def are_ready(self) -> bool:
        return all(entry.is_ready for entry in self.dependencies)

    def failure(self) -> Error | None:
        return next((entry.error for entry in self.dependencies if entry.error is not None), None)

    def unpack(self) -> tuple[list[Any], dict[str, Any]]:
        args = [self._filled(value.unpack()) for value in self._packed]
        return args, {name: self._filled(value.unpack()) for name, value in self._plain.items()}

    def _filled(self, value: Any) -> Any:
        return self.dependencies[value.place].get() if isinstance(value, Dependency) else value


class Call(Message):
    """A call of an actor's method."""

    def __init__(
        self, view: View, method: str, group: str, arguments: Arguments, entry: Entry | None, stream: Stream | None
    ) -> None:
        super().__init__("call", method, arguments.size, view.worker.process)
        self.view = view
        self.group = group
        self.arguments: Arguments | None = arguments
        self.entry = entry
        self.stream = stream
        self.answers: Incarnation | None = None
        """The process that it was sent to."""
        self.keeps: object = None
        """The handle by which a call that hasn't ended keeps its actor."""
        self._last_item_s = 0.0

    def fail(self, error: Error) -> None:
        """Have the caller get an error. Only the first outcome counts."""
        self.arguments = self.keeps = None
        self.view.in_flight.pop(self, None)
        if self.entry is not None:
            self.entry.resolve(None, error)
        if self.stream is not None and not self.stream.is_over:
            last = Entry(self.view.worker)
            last.resolve(None, error)
            self.stream.add(last)
            self.stream.end()

    # ---- at the actor

    def answer(self, value: Packed | None, error: Error | None) -> None:
        """Send the outcome to the caller."""
        cluster = self.view.worker.cluster
        self.arguments = None
        cluster.pass_boundary(Boundary.ANSWERED, self)
        if self.entry is None and self.stream is None:
            return
        now_s, delays = cluster.world.now_s, cluster.delays
        at_s = max(self._last_item_s, now_s + delays.network())
        cluster.world.call_later(at_s - now_s, partial(self._heard, value, error, now_s + delays.flush()))

    def _heard(self, value: Packed | None, error: Error | None, flushed_s: float) -> None:
        caller = self.view.worker
        if caller.has_ended or self._was_lost(flushed_s):
            return
        caller.cluster.pass_boundary(Boundary.HEARD, self)
        if caller.has_ended:
            return
        self.view.in_flight.pop(self, None)
        self.keeps = None
        if self.entry is not None:
            self.entry.resolve(value, error)
        if self.stream is not None:
            self.stream.end()

    def send_item(self, value: Packed | None, error: Error | None) -> None:
        """Send an item of a method that yields."""
        cluster = self.view.worker.cluster
        now_s, delays = cluster.world.now_s, cluster.delays
        self._last_item_s = max(self._last_item_s, now_s + delays.network())
        cluster.pass_boundary(Boundary.ANSWERED, self)
        flushed_s = now_s + delays.flush()
        cluster.world.call_later(self._last_item_s - now_s, partial(self._item_came, value, error, flushed_s))

    def _item_came(self, value: Packed | None, error: Error | None, flushed_s: float) -> None:
        caller, stream = self.view.worker, self.stream
        if caller.has_ended or stream is None or stream.is_over or self._was_lost(flushed_s):
            return
        cluster = caller.cluster
        cluster.pass_boundary(Boundary.HEARD, self)
        entry = Entry(caller)
        if cluster.draws.random() < cluster.share_of_late_values:
            # the item is known, and its value still at the actor
            cluster.world.call_later(cluster.delays.network(), partial(self._value_came, entry, value, error))
        else:
            entry.resolve(value, error)
        stream.add(entry)

    def _value_came(self, entry: Entry, value: Packed | None, error: Error | None) -> None:
        assert self.answers is not None
        if not self.answers.process.has_ended:
            entry.resolve(value, error)
        elif self.view.death is not None:
            entry.resolve(None, self.view.death)
        else:
            entry.resolve(None, errors.unavailable(self.view.actor))

    def _was_lost(self, flushed_s: float) -> bool:
        assert self.answers is not None
        ended_s = self.answers.worker.ended_s
        return ended_s is not None and ended_s < flushed_s


class _Lane:
    """The calls of one process to one concurrency group of an actor, in order."""

    def __init__(self) -> None:
        self.waiting: deque[Call] = deque()
        self.last_s = 0.0
        self.is_blocked = False
        """Whether the first one waits for its arguments."""


class View:
    """What one process knows of an actor, and the calls that it has made."""

    def __init__(self, worker: Worker, actor: Actor) -> None:
        self.worker = worker
        self.actor = actor
        self.incarnation: Incarnation | None = None
        """The process to which calls are sent. None: none is known."""
        self.death: Error | None = None
        self.in_flight: dict[Call, None] = {}
        self._lanes: dict[str, _Lane] = {}
        self._version = -1
        actor.gcs.subscribe(self)

    @property
    def is_waiting(self) -> bool:
        return any(lane.waiting for lane in self._lanes.values())

    def make(self, call: Call) -> None:
        """Send a call when its turn comes."""
        lane = self._lanes.get(call.group)
        if lane is None:
            lane = self._lanes[call.group] = _Lane()
        lane.waiting.append(call)
        self._go_on(lane)

    def update(self, version: int, incarnation: Incarnation | None, death: Error | None) -> None:
        """What the control store tells. Later news have higher versions."""
        if version <= self._version or self.worker.has_ended:
            return
        self._version = version
        before, self.incarnation, self.death = self.incarnation, incarnation, death
        if death is not None:
            for call in [*self.in_flight, *(call for lane in self._lanes.values() for call in lane.waiting)]:
                call.fail(death)
            for lane in self._lanes.values():
                lane.waiting.clear()
        elif before is not None and incarnation is not before:
            for call in [call for call in self.in_flight if call.answers is before]:
                call.fail(errors.unavailable(self.actor))
        for lane in self._lanes.values():
            self._go_on(lane)

    def _go_on(self, lane: _Lane) -> None:
        cluster = self.worker.cluster
        while lane.waiting and not lane.is_blocked:
            call = lane.waiting[0]
            assert call.arguments is not None
            if self.death is not None:
                lane.waiting.popleft()
                cluster.world.call_later(cluster.delays.flush(), partial(call.fail, self.death))
                continue
            if not call.arguments.are_ready:
                lane.is_blocked = True
                missing = next(entry for entry in call.arguments.dependencies if not entry.is_ready)
                missing.when_ready(partial(self._unblock, lane))
                return
            failure = call.arguments.failure()
            if failure is not None:
                lane.waiting.popleft()
                call.fail(failure)
                continue
            if self.incarnation is None:
                return
            lane.waiting.popleft()
            self._send(call, lane, self.incarnation)

    def _unblock(self, lane: _Lane) -> None:
        lane.is_blocked = False
        if not self.worker.has_ended:
            self._go_on(lane)

    def _send(self, call: Call, lane: _Lane, receiver: Incarnation) -> None:
        cluster = self.worker.cluster
        call.answers, call.receiver = receiver, receiver.process
        if call.entry is not None or call.stream is not None:
            self.in_flight[call] = None
        now_s = cluster.world.now_s
        lane.last_s = max(lane.last_s, now_s + cluster.delays.network())
        flushed_s = min(now_s + cluster.delays.flush(), lane.last_s)
        cluster.world.call_later(lane.last_s - now_s, partial(self._arrive, call, receiver, flushed_s))
        cluster.pass_boundary(Boundary.SENT, call)

    def _arrive(self, call: Call, receiver: Incarnation, flushed_s: float) -> None:
        ended_s = self.worker.ended_s
        if ended_s is not None and ended_s < flushed_s:
            return
        self.worker.cluster.pass_boundary(Boundary.RECEIVED, call)
        if receiver.process.has_ended:
            self.break_off(call)
        else:
            receiver.receive(call)

    def breaks(self, receiver: Incarnation) -> None:
        """The connection to an actor's process has ended."""
        for call in [call for call in self.in_flight if call.answers is receiver]:
            self.break_off(call)

    def break_off(self, call: Call) -> None:
        assert call.answers is not None
        if self.worker.has_ended or call.answers.node.is_lost:
            return  # nobody says that the connection is broken
        if self.death is not None:
            call.fail(self.death)
        elif call in self.in_flight:
            self.worker.cluster.world.call_later(_WAIT_FOR_REASON_S, partial(self._give_up, call))

    def _give_up(self, call: Call) -> None:
        if call in self.in_flight and not self.worker.has_ended:
            call.fail(errors.unavailable(self.actor))
