"""Where the engine's loop and its callers meet.

Callers' threads put commands in and take output batches out; the loop's thread does the reverse. Nothing else is
shared between them, so neither ever waits for the other's work. Owns the decision when outputs are worth sending;
knows neither Ray nor what a request is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import msgspec

from raycore.messages import NO_LOAD, EngineRequest, FinishedRequest, LoadView, OutputBatch, client_of
from raycore.scheduler.outputs import StepOutputs

IDLE_CHECK_S = 1.0
"""An output stream without outputs wakes up this often: to notice that its consumer is gone, and to tell it of a load
that has changed."""


@dataclass(slots=True)
class Submit:
    """Take these requests on."""

    requests: list[EngineRequest]
    undecodable: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """(seq_id, reason) of requests that came in the same message and can't be decoded."""


@dataclass(slots=True)
class Abort:
    """Drop these requests; unknown ones have finished already."""

    seq_ids: list[int]


@dataclass(slots=True)
class ForgetClient:
    """A client is gone: drop its requests, send it nothing, and ignore what of its own may still come."""

    client: int


@dataclass(slots=True)
class Utility:
    """Call a method of the engine by name, between two steps."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reply: Future[Any] = field(default_factory=Future[Any])


@dataclass(slots=True)
class StartWave:
    """A peer that shares experts with this engine has started a wave (see `waves`)."""

    wave: int


Command = Submit | Abort | ForgetClient | Utility | StartWave


class Mailbox:
    """Commands in, output batches out. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._commands: deque[Command] = deque()
        self._failure: BaseException | None = None
        self._stopping = False
        self._outboxes: dict[int, _Outbox] = {}
        self._forgotten: set[int] = set()
        """Clients that are gone; no later one has the index of one of these."""
        self._load = NO_LOAD
        """The rank's, as the loop last said."""

    # ---- the callers' side

    def put(self, command: Command) -> None:
        """Hand a command to the loop."""
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def stop(self) -> None:
        """Have the loop return after its present step."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()

    def fail(self, error: BaseException) -> None:
        """Have the loop raise `error` after its present step. The first failure wins."""
        with self._arrived:
            self._failure = self._failure or error
            self._arrived.notify()

    def outputs(self, client: int) -> Iterator[bytes]:
        """Encoded `OutputBatch`es for one client, until the mailbox is closed. One stream for each client.

        A client that gets no outputs gets a batch with the load alone when the number of requests has changed, so that
        it knows where to send its next request.
        """
        outbox = self._outboxes.setdefault(client, _Outbox())
        if client in self._forgotten:
            return
        told = NO_LOAD
        while True:
            batch = outbox.take(timeout_s=IDLE_CHECK_S)
            if batch is None:
                if outbox.closed:
                    return
                if _has_as_many_requests(self._load, told):
                    continue
                batch = OutputBatch()
            told = batch.load = self._load
            yield msgspec.msgpack.encode(batch)

    # ---- the loop's side

    def take(self, wait_s: float = 0.0) -> list[Command]:
        """The commands that have arrived; if there are none, wait up to `wait_s` for one.

        Raises whatever `fail()` was given.
        """
        if not (wait_s or self._commands or self._failure):
            return []  # the busy loop's way through: no lock
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
        """Keep a step's outputs for their clients, and send them if they shouldn't wait for more."""
        self._load = load
        for client, part in outputs.by_client():
            self._outboxes.setdefault(client, _Outbox()).add(part)

    def note_load(self, load: LoadView) -> None:
        """The rank's load has changed without an output."""
        self._load = load

    def refuse(self, seq_id: int, error: str, finish_reason: str = "error") -> None:
        """Tell a request's client that it can't be run; for the reasons see `FinishedRequest`."""
        outbox = self._outboxes.setdefault(client_of(seq_id), _Outbox())
        outbox.add(StepOutputs(finished=[FinishedRequest(seq_id, finish_reason, error)]))

    def forget_client(self, client: int) -> None:
        """End a client's output stream, and take no requests of its any more."""
        self._forgotten.add(client)
        outbox = self._outboxes.pop(client, None)
        if outbox is not None:
            outbox.close()

    def is_forgotten(self, seq_id: int) -> bool:
        """Whether a request's client is gone."""
        return client_of(seq_id) in self._forgotten

    def close(self) -> None:
        """End every output stream once it has been drained, and refuse what was never answered."""
        for outbox in list(self._outboxes.values()):
            outbox.close()
        with self._arrived:
            for command in self._commands:
                if isinstance(command, Utility):
                    command.reply.set_exception(RuntimeError(f"the engine stopped before {command.method}() ran"))
            self._commands.clear()


class _Outbox:
    """One client's outputs between two sends."""

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._steps: list[tuple[StepOutputs, float]] = []
        """With the times at which they came."""
        self._due_s = float("inf")
        self._is_due = False
        self.closed = False

    def add(self, outputs: StepOutputs) -> None:
        now = time.monotonic()
        with self._ready:
            self._steps.append((outputs, now))
            self._due_s = min(self._due_s, now + outputs.flush_interval_s)
            if outputs.finished or now >= self._due_s:
                self._is_due = True
                self._ready.notify()

    def take(self, timeout_s: float) -> OutputBatch | None:
        """Everything since the last take, once it is due; None after `timeout_s` or when closed and drained.

        The batch has no load yet.
        """
        with self._ready:
            if not (self._is_due or self.closed):
                self._ready.wait(timeout_s)
            if not (self._is_due or self.closed) or not self._steps:
                return None
            steps, self._steps = self._steps, []
            self._is_due = False
            self._due_s = float("inf")
        return StepOutputs.merge(steps, time.monotonic())

    def close(self) -> None:
        with self._ready:
            self.closed = True
            self._ready.notify_all()


def _has_as_many_requests(load: LoadView, other: LoadView) -> bool:
    return (load.num_waiting, load.num_running) == (other.num_waiting, other.num_running)
