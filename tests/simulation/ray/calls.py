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
    from simulation.ray.nodes import Node
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
        self.failure: Error | None = None
        """Why it has failed without an answer."""
        self._last_item_s = 0.0

    def fail(self, error: Error) -> None:
        """Have the caller get an error. Only the first outcome counts."""
        self.arguments = self.keeps = None
        self.failure = error
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
        value, error = self._unless_raised(value, error)
        self.view.in_flight.pop(self, None)
        self.keeps = None
        if self.entry is not None:
            self.entry.resolve(value, error, self._node)
        if self.stream is not None:
            self.stream.end()

    @property
    def _node(self) -> Node | None:
        """Where it was answered."""
        return None if self.answers is None else self.answers.node

    def send_item(self, value: Packed | None, error: Error | None) -> None:
        """Send an item of a method that yields."""
        cluster = self.view.worker.cluster
        cluster.pass_boundary(Boundary.ANSWERED, self)  # its process may stand still here
        now_s, delays = cluster.world.now_s, cluster.delays
        self._last_item_s = max(self._last_item_s, now_s + delays.network())
        flushed_s = now_s + delays.flush()
        cluster.world.call_later(self._last_item_s - now_s, partial(self._item_came, value, error, flushed_s))

    def _item_came(self, value: Packed | None, error: Error | None, flushed_s: float) -> None:
        caller, stream = self.view.worker, self.stream
        if caller.has_ended or stream is None or stream.is_over or self._was_lost(flushed_s):
            return
        cluster = caller.cluster
        cluster.pass_boundary(Boundary.HEARD, self)
        value, error = self._unless_raised(value, error)
        entry = Entry(caller)
        entry.when_lost = lambda: self.failure
        if cluster.draws.random() < cluster.share_of_late_values:
            # the item is known, and its value still at the actor
            cluster.world.call_later(cluster.delays.network(), partial(self._value_came, entry, value, error))
        else:
            entry.resolve(value, error, self._node)
        stream.add(entry)

    def _value_came(self, entry: Entry, value: Packed | None, error: Error | None) -> None:
        assert self.answers is not None
        if not self.answers.process.has_ended:
            entry.resolve(value, error, self._node)
        elif self.view.death is not None:
            entry.resolve(None, self.view.death)
        else:
            entry.resolve(None, errors.unavailable(self.view.actor))

    def _unless_raised(self, value: Packed | None, error: Error | None) -> tuple[Packed | None, Error | None]:
        """What the caller gets of what has come."""
        raised = self.view.worker.cluster.raised_at(Boundary.HEARD, self)
        return (value, error) if raised is None else (None, lambda: raised)

    def _was_lost(self, flushed_s: float) -> bool:
        assert self.answers is not None
        ended_s = self.answers.worker.ended_s
        return ended_s is not None and ended_s < flushed_s


class View:
    """What one process knows of an actor, and the calls that it has made."""

    def __init__(self, worker: Worker, actor: Actor) -> None:
        self.worker = worker
        self.actor = actor
        self.incarnation: Incarnation | None = None
        """The process to which calls are sent. None: none is known."""
        self.death: Error | None = None
        self.is_restarting = False
        self.in_flight: dict[Call, None] = {}
        self._waiting: deque[Call] = deque()
        """Calls of all groups, in the order in which they were made: one that waits holds back those after it."""
        self._is_blocked = False
        """Whether the first one waits for its arguments."""
        self._last_s: dict[str, float] = {}
        """When the last call to each group arrives."""
        self._version = -1
        actor.gcs.subscribe(self)

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def make(self, call: Call) -> None:
        """Send a call when its turn comes."""
        self._waiting.append(call)
        self._go_on()

    def update(self, version: int, incarnation: Incarnation | None, death: Error | None, is_restarting: bool) -> None:
        """What the control store tells. Later news have higher versions."""
        if version <= self._version or self.worker.has_ended:
            return
        self._version = version
        before, self.incarnation, self.death = self.incarnation, incarnation, death
        self.is_restarting = is_restarting
        if death is not None:
            for call in [*self.in_flight, *self._waiting]:
                call.fail(death)
            self._waiting.clear()
        elif before is not None and incarnation is not before:
            for call in [call for call in self.in_flight if call.answers is before]:
                call.fail(errors.unavailable(self.actor))
        self._go_on()

    def _go_on(self) -> None:
        cluster = self.worker.cluster
        while self._waiting and not self._is_blocked:
            call = self._waiting[0]
            assert call.arguments is not None
            if self.death is not None:
                self._waiting.popleft()
                cluster.world.call_later(cluster.delays.flush(), partial(call.fail, self.death))
                continue
            if not call.arguments.are_ready:
                self._is_blocked = True
                missing = next(entry for entry in call.arguments.dependencies if not entry.is_ready)
                missing.when_ready(self._unblock)
                return
            if self.is_restarting:  # calls are not repeated, so they don't wait for it either
                self._waiting.popleft()
                cluster.world.call_later(cluster.delays.flush(), partial(call.fail, errors.restarting(self.actor)))
                continue
            if self.incarnation is None:
                return
            self._waiting.popleft()
            self._send(call, self.incarnation)

    def _unblock(self) -> None:
        self._is_blocked = False
        if not self.worker.has_ended:
            self._go_on()

    def _send(self, call: Call, receiver: Incarnation) -> None:
        cluster = self.worker.cluster
        call.answers, call.receiver = receiver, receiver.process
        if call.entry is not None or call.stream is not None:
            self.in_flight[call] = None
        now_s = cluster.world.now_s
        way_s = cluster.delays.network() + cluster.late_by_s(call)
        arrives_s = self._last_s[call.group] = max(self._last_s.get(call.group, 0.0), now_s + way_s)
        flushed_s = min(now_s + cluster.delays.flush(), arrives_s)
        cluster.world.call_later(arrives_s - now_s, partial(self._arrive, call, receiver, flushed_s))
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
