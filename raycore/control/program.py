"""The program's side of the control actor: one thread that publishes status changes and takes commands.

The actor's name is the engine's, and a cluster has only one such actor. If the user chose the name, the actor is
therefore created before the engine starts, so that a second engine with this name is refused. Otherwise the thread
creates it two seconds after the engine is up, so that the start of its process doesn't delay the first requests. The
engine works without the actor. While nothing changes, the thread makes one call per `POLL_S`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec
from ray.exceptions import RayError

from raycore.cluster.failure_reports import describe_death
from raycore.control.commands import ACTOR_PREFIX, NAMESPACE, CallCommand, CommandOutcome
from raycore.control.control_actor import ENGINE_CONTROL, EngineControl
from raycore.errors import ControlError, InvalidConfig
from raycore.node.processes import wait_until_gone
from raycore.ray_api import cluster_address, find_actor, get, is_connected, kill, node_id, on_node
from raycore.recurring import Recurring
from raycore.same_copy import seal, unseal
from raycore.status import EngineStatus
from raycore.system import Future, threading, time

logger = logging.getLogger(__name__)

POLL_S = 30.0
"""Duration of one poll for commands, in seconds."""

_PUBLISH_S = 1.0
"""Interval, in seconds, at which the status is checked. It is published only if it has changed."""

_MAX_RANKS_PER_S = 256
"""The status has an entry for each rank. With more ranks, it is checked more rarely."""

_DELAY_S = 2.0
"""Delay, in seconds, before the actor's process is started. Its start takes a second of CPU time."""

_RETRY_S = 10.0
_END_TIMEOUT_S = 5.0

_CLAIM_S = 15.0
"""How long to wait, in seconds, for a name whose engine doesn't answer. Ray releases the name of an ended actor with a
delay, and an actor that is just starting answers after a second or more."""

_CLAIM_POLL_S = 0.05

Command = tuple[int, bytes]


class ControlThread:
    """Makes an engine reachable from other processes."""

    def __init__(
        self, name: str, read_status: Callable[[], EngineStatus], calls: Mapping[str, Callable[..., object]]
    ) -> None:
        """Create the thread. `start()` starts it.

        Args:
            name: the engine's name, by which other processes find the engine.
            read_status: returns the engine's current status; called every second.
            calls: what other processes may call, by name. May raise anything.
        """
        self._name = name
        self._read_status = read_status
        self._calls = calls
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._claimed: EngineControl | None = None
        self._is_up = False
        self._pid: Future[int] | None = None
        self._thread = threading.Thread(target=self._run, name="raycore-control", daemon=True)

    def claim(self) -> Callable[[], object]:
        """Create the actor and start the thread now, before the engine starts. Needs a connection to Ray.

        Returns: a function that ends both again, in case the engine fails to start.

        Raises:
            InvalidConfig: another engine of the cluster has the name.
        """
        deadline_s = time.monotonic() + _CLAIM_S
        while True:
            try:
                self._claimed = self._create(self._read_status())
                self._thread.start()
                return self._give_up
            except ValueError:  # the name is taken
                left_s = deadline_s - time.monotonic()
                other = _engine_named(self._name, max(0.0, left_s))
                if other is not None or left_s <= 0:
                    raise InvalidConfig(self._taken_by(other)) from None
            time.sleep(_CLAIM_POLL_S)

    def start(self) -> None:
        """Take commands from now on. Other processes can reach the engine a few seconds later."""
        self._is_up = True
        self._wake.set()  # others still see the status of an engine that is starting
        if self._thread.ident is None:
            self._thread.start()

    def stop(self) -> None:
        """Tell the thread and the actor's process to end. Doesn't wait until they have ended. Idempotent."""
        self._stopping.set()
        self._wake.set()

    def join(self) -> None:
        """After `stop()`: wait for the thread, if it was started, and the actor's process to end."""
        if self._thread.ident is not None:
            self._thread.join(_END_TIMEOUT_S)
        claimed, self._claimed = self._claimed, None
        if claimed is not None:  # the thread was told to stop before it could use the actor
            self._end(claimed)
        if self._pid is not None and self._pid.done() and self._pid.exception() is None:
            wait_until_gone([self._pid.result()], _END_TIMEOUT_S)

    def _run(self) -> None:
        delay_s, failures = 0.0 if self._claimed is not None else _DELAY_S, Recurring()
        while not self._stopping.wait(delay_s) and is_connected():
            if self._read_status().failure is not None:
                return  # for a program whose node has ended, Ray keeps another actor pending for ever
            try:
                self._serve()
            except (RayError, ValueError) as error:  # Ray raises ValueError if the name is taken
                if not self._stopping.is_set() and failures.is_due(type(error)):
                    text = "`raycore status` and `raycore scale` can't reach engine %s: %s"
                    logger.warning(text, self._name, describe_death(error))
            delay_s = _RETRY_S

    def _serve(self) -> None:
        status = self._read_status()
        actor, self._claimed = self._claimed or self._create(status), None
        try:
            self._pid = actor.pid.remote().future()
            self._exchange(actor, status)
        finally:
            self._end(actor)

    def _create(self, status: EngineStatus) -> EngineControl:
        """Create the actor. Raises ValueError if the name is taken."""
        return ENGINE_CONTROL.options(
            name=f"{ACTOR_PREFIX}{self._name}",
            namespace=NAMESPACE,
            # on this node, so that a node failure that ends this process ends the actor too
            scheduling_strategy=on_node(node_id()),
        ).remote(f"raycore_{self._name}_control", seal(msgspec.msgpack.encode(status)))

    def _taken_by(self, other: EngineStatus | None) -> str:
        address = cluster_address()
        which = (
            "which doesn't answer (if its node has failed, Ray releases the name after a while)"
            if other is None
            else f"of model {other.model}"
        )
        return (
            f"engine_name={self._name!r} is the name of another engine in the Ray cluster at {address}, {which}: "
            "choose another name, or end that engine. "
            f"`raycore status --address {address} --name {self._name}` shows it."
        )

    def _exchange(self, actor: EngineControl, published: EngineStatus) -> None:
        poll = self._ask(actor)
        while not self._stopping.is_set():
            status = self._read_status()
            if status != published:
                actor.publish.remote(seal(msgspec.msgpack.encode(status)))
                published = status
            self._wake.wait(max(_PUBLISH_S, len(status.ranks) / _MAX_RANKS_PER_S))
            self._wake.clear()
            if poll.done():
                command = poll.result()
                poll = self._ask(actor)
                if command is not None:
                    # on its own thread: a call may take minutes, while status changes still have to be published
                    threading.Thread(
                        target=self._execute, args=(actor, *command), name="raycore-control-call", daemon=True
                    ).start()

    def _ask(self, actor: EngineControl) -> Future[Command | None]:
        poll = actor.next_command.remote(POLL_S).future()
        poll.add_done_callback(lambda _: self._wake.set())
        return poll

    def _execute(self, actor: EngineControl, number: int, data: bytes) -> None:
        try:
            message = unseal(data, "the process that sent the command", ControlError)
            command = msgspec.msgpack.decode(message, type=CallCommand)
            logger.info("another process calls %s(%s)", command.method, command.arguments)
            if not self._is_up:
                raise ControlError(f"engine {self._name} is still starting")
            self._calls[command.method](**command.arguments)
            outcome = CommandOutcome()
        except Exception as error:  # the thread's outermost frame: the caller is told of any error
            outcome = CommandOutcome(describe_death(error))
        if not self._stopping.is_set():
            encoded = [seal(msgspec.msgpack.encode(each)) for each in (outcome, self._read_status())]
            actor.finish.remote(number, *encoded)

    def _give_up(self) -> None:
        self.stop()
        self.join()

    def _end(self, actor: EngineControl) -> None:
        if is_connected():
            kill(actor)


def _engine_named(name: str, timeout_s: float) -> EngineStatus | None:
    """The status of the engine called `name`. None if it has ended, or doesn't answer within `timeout_s`.

    Raises:
        InvalidConfig: it runs another copy of raycore.
    """
    with suppress(ValueError, RayError):  # a ValueError if there is no such actor any more
        other: EngineControl = find_actor(f"{ACTOR_PREFIX}{name}", NAMESPACE)
        data, _ = get(other.status.remote(), timeout_s=timeout_s)
        message = unseal(data, f"another engine with engine_name={name!r}", InvalidConfig)
        return msgspec.msgpack.decode(message, type=EngineStatus)
    return None
