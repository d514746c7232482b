"""The queues between an engine's loop and its callers.

Callers' threads add commands and receive batches of outputs. The loop's thread takes the commands and adds outputs. So
neither side waits for the other's work. The mailbox also decides when outputs are sent. This module doesn't import Ray.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from raycore.activity import Activity
from raycore.errors import EngineDeadError
from raycore.messages import NO_LOAD, CacheChanges, EngineRequest, FinishedRequest, LoadView, OutputBatch, client_of
from raycore.scheduler.outputs import StepOutputs
from raycore.system import Future, threading, time
from raycore.worker.rank import Regrouping

if TYPE_CHECKING:
    from raycore.kvcache.cache_log import CacheLog

IDLE_CHECK_S = 1.0
"""How often, in seconds, an output stream without outputs checks whether it should send a changed load."""

_MAX_LOADS_PER_S = 200
"""What a client gets of these from all ranks together: with more ranks, each sends its load more rarely."""


@dataclass(slots=True)
class Submit:
    """A command: add these requests."""

    requests: list[EngineRequest]
    undecodable: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(seq_id, reason) of requests in the same message that can't be decoded."""
    arrived_s: float = field(default_factory=time.monotonic)
    """When the engine got them. Its loop sees them after the step that runs then."""


@dataclass(slots=True)
class Abort:
    """A command: abort these requests. The seq_ids of requests that have finished are ignored."""

    seq_ids: list[int]


@dataclass(slots=True)
class ForgetClient:
    """A command: a client has disconnected. Abort its requests, and end its output stream."""

    client: int
    is_gone: bool = True
    """Whether the client's later requests are ignored. False: it may connect again, and gets another stream."""
    connection: int = 0
    """If it may: which of its connections to the rank it has left."""


@dataclass(slots=True)
class Utility:
    """A command: call a method of the engine by name, between two steps."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply: Future[Any] = field(default_factory=Future[Any])
    """Completed with the method's result or exception."""


@dataclass(slots=True)
class StartWave:
    """A command: another engine that shares experts has started the wave with this number; see `waves`."""

    wave: int
    generation: int = 0
    """The number of the group of engines whose wave it is. Groups that the engine has left don't concern it."""


@dataclass(slots=True)
class SetActivity:
    """A command: change to this activity, once the steps in flight have ended."""

    activity: Activity
    clear_cache: bool = False
    """Drop the keys and values of all requests, and the prefix cache."""
    reply: Future[dict[int, int]] = field(default_factory=Future[dict[int, int]])
    """Completed with the result of `Mailbox.flush()` when the rank has changed to the activity, or with an error."""


@dataclass(slots=True)
class PauseForRegrouping:
    """A command: run no more steps until the engine joins another group."""

    reply: Future[None] = field(default_factory=Future[None])
    """Completed when the engine is at rest, or with an error."""


@dataclass(slots=True)
class Regroup:
    """A command: join another group of engines that share experts. All engines concerned are paused for it."""

    regrouping: Regrouping
    stays: bool
    """Whether the engine belongs to the new group."""
    reply: Future[None] = field(default_factory=Future[None])
    """Completed when the engine belongs to the new group, or with an error."""


Change = SetActivity | PauseForRegrouping | Regroup
"""What an engine does when it is at rest: no step is in flight, and no wave runs."""
Command = Submit | Abort | ForgetClient | Utility | StartWave | Change


class Mailbox:
    """The queue of commands for one engine, and a queue of outputs for each client. Thread-safe."""

    def __init__(self, num_ranks: int = 1) -> None:
        """`num_ranks`: how many ranks the engine has."""
        self._num_ranks = num_ranks
        self._arrived = threading.Condition()
        self._commands: deque[Command] = deque()
        self._failure: BaseException | None = None
        self._stopping = False
        self._outboxes: dict[int, _Outbox] = {}
        self._forgotten: set[int] = set()
        """Indexes of clients that are gone. No later client gets one of these indexes."""
        self._left: dict[int, int] = {}
        """By client: the last one of its connections that it has left."""
        self._load = NO_LOAD
        """The rank's load, as last set by the loop."""
        self.cache_log: CacheLog | None = None
        """What clients are told of the prefix cache. None: nothing. Set before the first stream begins."""
        self.changes: deque[Change] = deque()
        """Changes that wait until the rank is at rest. Only the loop uses them, and `close()`."""

    # ---- the callers' side

    def put(self, command: Command) -> None:
        """Queue a command for the loop."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def stop(self) -> None:
        """Make the loop return after its current step."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()

    def fail(self, error: BaseException) -> None:
        """Make the loop raise `error` after its current step. If this is called twice, the first error counts."""
        with self._arrived:
            self._failure = self._failure or error
            self._arrived.notify()

    def outputs(self, client: int, connection: int = 0) -> Iterator[bytes]:
        """Yield encoded `OutputBatch`es for one client until the mailbox is closed or the client is forgotten.

        A client may have one such stream for each of its connections to the rank, whose numbers count up. The call for
        a stream may arrive late: a stream whose connection the client has left already ends at once. It may arrive
        early, too: a stream yields no outputs until the client has left its earlier connections.

        If there are no outputs but the rank's number of requests has changed, the stream yields a batch with only the
        load, because the client routes requests by load. The same goes for the prefix cache, if there is a log of it.
        """
        told, position, log = NO_LOAD, -1, self.cache_log
        idle_check_s = max(IDLE_CHECK_S, self._num_ranks / _MAX_LOADS_PER_S)
        while True:
            if connection <= self._left.get(client, -1):
                return
            outbox = self._outbox_of(client)
            if client in self._forgotten:
                self._outboxes.pop(client, None)  # made just now, and for nobody
                return
            batch = outbox.take(connection, timeout_s=idle_check_s)
            changes: CacheChanges | None = None
            if log is not None:
                changes, position = log.since(position)
            if batch is None:
                if outbox.closed:
                    if self._outboxes.get(client) is outbox:
                        return  # the mailbox is closed
                    continue  # the outbox was that of an earlier connection
                if _has_as_many_requests(self._load, told) and changes is None:
                    continue
                batch = OutputBatch()
            told, batch.cache = self._load, changes
            batch.load = told
            yield msgspec.msgpack.encode(batch)

    def _outbox_of(self, client: int) -> _Outbox:
        outbox = self._outboxes.get(client)  # nearly always: no outbox is made only to be dropped
        return self._outboxes.setdefault(client, _Outbox()) if outbox is None else outbox

    # ---- the loop's side

    def take(self, wait_s: float = 0.0) -> list[Command]:
        """Remove and return the queued commands. If there are none, wait up to `wait_s` seconds for a command.

        Raises the error passed to `fail()`, if any.
        """
        if not (wait_s or self._commands or self._failure):
            return []  # fast path for a busy loop: takes no lock
        with self._arrived:
            if wait_s and not (self._commands or self._stopping or self._failure):
                self._arrived.wait(wait_s)
            if self._failure is not None:
                raise self._failure
            commands = list(self._commands)
            self._commands.clear()
        return commands

    @property
    def stopping(self) -> bool:
        """Whether `stop()` was called."""
        return self._stopping

    def publish(self, outputs: StepOutputs, load: LoadView) -> None:
        """Queue a step's outputs for their clients.

        All waiting outputs of a client are sent together: as soon as one of its requests finishes, or with the first
        step that ends after an output has waited for its request's `flush_interval_s`.
        """
        self._load = load
        for client, part in outputs.by_client():
            self._give(client, part)

    def flush(self) -> dict[int, int]:
        """Send all waiting outputs at once.

        Returns: for each client, the number of batches with outputs that the rank has sent to it, these included. The
        client counts the batches that it has received, so it knows when it has received everything.
        """
        return {client: outbox.flush() for client, outbox in self._outboxes.copy().items()}

    def note_load(self, load: LoadView) -> None:
        """Set the rank's load. Called when the load has changed although there are no outputs."""
        self._load = load

    def refuse(self, seq_id: int, error: str, finish_reason: str = "error") -> None:
        """Tell the request's client that the request can't run, and why. `FinishedRequest` lists finish reasons."""
        self._give(client_of(seq_id), StepOutputs(finished=[FinishedRequest(seq_id, finish_reason, error)]))

    def ask_for_features(self, seq_id: int, identifiers: list[str]) -> None:
        """Tell the request's client that the request can't begin without the data of these features."""
        self._give(client_of(seq_id), StepOutputs(missing_features=[(seq_id, identifiers)], flush_interval_s=0.0))

    def _give(self, client: int, outputs: StepOutputs) -> None:
        """Queue outputs for a client, unless it is gone: a step may end that has preempted one of its requests."""
        if client not in self._forgotten:
            self._outbox_of(client).add(outputs)

    def forget_client(self, client: int, *, is_gone: bool = True, connection: int = 0) -> None:
        """End a client's output stream. If it is gone, `is_forgotten()` returns True for its requests from now on.

        Otherwise, the stream of its next `connection` begins with the outputs from now on, and `flush()` counts from
        there.
        """
        if is_gone:
            self._forgotten.add(client)
        else:
            self._left[client] = connection
        outbox = self._outboxes.pop(client, None)
        if outbox is not None:
            outbox.close()

    def is_forgotten(self, seq_id: int) -> bool:
        """Whether the client of the request `seq_id` is gone."""
        return client_of(seq_id) in self._forgotten

    def close(self) -> None:
        """End every output stream once its queued outputs are sent, and fail utility calls that are still queued."""
        for outbox in list(self._outboxes.values()):
            outbox.close()
        with self._arrived:
            for command in [*self.changes, *self._commands]:
                if isinstance(command, Utility):
                    command.reply.set_exception(EngineDeadError(f"the engine stopped before {command.method}() ran"))
                elif isinstance(command, Change):
                    command.reply.set_exception(EngineDeadError("the engine stopped before it made a change"))
            self.changes.clear()
            self._commands.clear()


class _Outbox:
    """The outputs for one client that haven't been sent yet."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._steps: list[tuple[StepOutputs, float]] = []
        """(outputs, time when they were added) of each step."""
        self._due_s = float("inf")
        self._is_due = False
        self._num_taken = 0
        """Number of batches that `take()` has returned."""
        self._connection: int | None = None
        """The connection of the client that gets the outputs: the first one that asks."""
        self.closed = False

    def add(self, outputs: StepOutputs) -> None:
        now = time.monotonic()
        with self._ready:
            self._steps.append((outputs, now))
            self._due_s = min(self._due_s, now + outputs.flush_interval_s)
            if outputs.finished or now >= self._due_s:
                self._is_due = True
                self._ready.notify_all()

    def take(self, connection: int, timeout_s: float) -> OutputBatch | None:
        """Wait until outputs are due, then remove all outputs and return them as one batch. The batch's load isn't set.

        Returns None if no outputs are due within `timeout_s` seconds, if the outbox is closed and empty, or if another
        connection gets them.
        """
        with self._ready:
            if self._connection is None:
                self._connection = connection
            is_other = self._connection != connection
            if not self.closed and (is_other or not self._is_due):
                self._ready.wait(timeout_s)
            if is_other or not (self._is_due or self.closed) or not self._steps:
                return None
            steps, self._steps = self._steps, []
            self._is_due = False
            self._due_s = float("inf")
            self._num_taken += 1
        return StepOutputs.merge(steps, time.monotonic())

    def flush(self) -> int:
        """Make all outputs due. Returns the number of batches that `take()` will have returned with them."""
        with self._ready:
            if not self._steps:
                return self._num_taken
            self._is_due = True
            self._ready.notify_all()
            return self._num_taken + 1

    def close(self) -> None:
        with self._ready:
            self.closed = True
            self._ready.notify_all()


def _has_as_many_requests(load: LoadView, other: LoadView) -> bool:
    return (load.num_waiting, load.num_running) == (other.num_waiting, other.num_running)
