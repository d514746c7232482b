"""Actors: their classes and handles, what the control store knows of them, and the processes in which they run."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from ray.exceptions import ActorAlreadyExistsError

from simulation import mistakes
from simulation.ray import errors
from simulation.ray.calls import Arguments, Call
from simulation.ray.errors import Error
from simulation.ray.messages import Boundary, Message, Packed, note, noted
from simulation.ray.nodes import Node, Pool
from simulation.ray.objects import Entry, ObjectRef, ObjectRefGenerator, Stream, here
from simulation.ray.workers import Job, Worker
from simulation.world import kernel
from simulation.world.kernel import ProcessExit

if TYPE_CHECKING:
    from simulation.ray.gcs import Gcs

DEFAULT_GROUP = "_default"
_LOOK_S = 0.1
"""How often a process that is to end looks whether it can."""


class Actor:
    """What the control store knows of an actor."""

    def __init__(self, gcs: Gcs, owner: Worker, chosen: Chosen, arguments: Arguments) -> None:
        options = chosen.options_
        self.gcs = gcs
        self.cluster = gcs.cluster
        self.owner = owner
        self.job: Job = owner.job
        self.id = gcs.cluster.new_id(16)
        self.asked_s = gcs.cluster.world.now_s
        """When its owner asked for it."""
        self.metadata = chosen.metadata
        self.class_name: str = chosen.metadata.class_name
        self.name: str = options.get("name") or ""
        self.namespace: str = options.get("namespace") or owner.job.namespace
        self.is_detached = options.get("lifetime") == "detached"
        self.strategy = options.get("scheduling_strategy")
        self.groups: dict[str, int] = {DEFAULT_GROUP: 1, **(options.get("concurrency_groups") or {})}
        self.amounts = _amounts(options)
        self.arguments = arguments
        self.restarts_left: float = float("inf") if options.get("max_restarts") == -1 else options["max_restarts"]
        self.state = "PENDING_CREATION"
        self.version = 0
        """Counts its changes."""
        self.incarnation: Incarnation | None = None
        """The process that runs or ran it last."""
        self.node: Node | None = None
        """The node to which it was sent."""
        self.pool: Pool | None = None
        """What its resources are taken from."""
        self.death: Error | None = None
        self.views: list[Any] = []
        self._num_handles = 0

    def __repr__(self) -> str:
        return self.name or self.class_name

    @property
    def is_dead(self) -> bool:
        return self.death is not None

    def hold(self) -> None:
        self._num_handles += 1

    def drop(self) -> None:
        self._num_handles -= 1
        # the end of its owner is what ends it then: nobody else counts
        if not self._num_handles and not self.is_detached and not self.is_dead and not self.owner.has_ended:
            self.gcs.later(self.cluster.delays.notice(), self._end_without_handles)

    def _end_without_handles(self) -> None:
        if not self._num_handles and not self.is_dead and not self.owner.has_ended:
            self.gcs.end(self, errors.died(self, errors.OUT_OF_SCOPE), gracefully=True)

    def release(self) -> None:
        """Give back what it holds."""
        if self.pool is not None:
            self.pool.give_back(self.amounts)
            self.pool = None
            if self.node is not None:
                self.node.changed(released=True)


def _amounts(options: dict[str, Any]) -> dict[str, float]:
    given = {"CPU": options.get("num_cpus") or 0.0, "GPU": options.get("num_gpus") or 0.0}
    return {name: float(amount) for name, amount in (given | (options.get("resources") or {})).items() if amount > 0}


class _Metadata:
    """As much of Ray's as others use."""

    def __init__(self, cls: type[Any]) -> None:
        self.class_name = cls.__name__
        self.modified_class = cls


class ActorClass:
    """A class made by `ray.remote`."""

    def __init__(self, cls: type[Any], options: dict[str, Any]) -> None:
        self.__ray_metadata__ = _Metadata(cls)
        self._options = options

    def options(self, **options: Any) -> Chosen:
        return Chosen(self.__ray_metadata__, {"max_restarts": 0, **self._options, **options})

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        return self.options().remote(*args, **kwargs)


class Chosen:
    """An actor class with options."""

    def __init__(self, metadata: _Metadata, options: dict[str, Any]) -> None:
        self.metadata = metadata
        self.options_ = options

    def options(self, **options: Any) -> Chosen:
        return Chosen(self.metadata, self.options_ | options)

    def remote(self, *args: Any, **kwargs: Any) -> ActorHandle:
        if self.options_.get("get_if_exists"):
            return self._get_or_create(args, kwargs)
        worker = here()
        gcs = worker.cluster.gcs
        actor = Actor(gcs, worker, self, Arguments(args, kwargs))
        message = Message("creation", self.metadata.class_name, actor.arguments.size, worker.process)
        worker.cluster.tell_message(message, repr(actor))
        if actor.name:
            for _ in range(2):  # Ray asks for the name, and then registers the actor. Another one may come between
                gcs.ask(message.what, lambda: _check_name(gcs, actor))
            gcs.ask(message.what, lambda: _register_named(gcs, actor))
        else:
            worker.cluster.pass_boundary(Boundary.BEFORE, message)
            worker.cluster.send(worker, lambda: gcs.when_up(lambda: gcs.register(actor)))
            worker.cluster.pass_boundary(Boundary.SENT, message)
        worker.owned.append(actor)
        return ActorHandle(actor, worker)

    def _get_or_create(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ActorHandle:
        from simulation.ray.api import get_actor

        name, namespace = self.options_["name"], self.options_.get("namespace")
        with suppress(ValueError):
            return get_actor(name, namespace)
        with suppress(ActorAlreadyExistsError):  # another process may have created it meanwhile
            return self.options(get_if_exists=False).remote(*args, **kwargs)
        return get_actor(name, namespace)


def _register_named(gcs: Gcs, actor: Actor) -> None:
    _check_name(gcs, actor)
    gcs.register(actor)


def _check_name(gcs: Gcs, actor: Actor) -> None:
    if gcs.holder(actor.name, actor.namespace) is not None:
        raise ActorAlreadyExistsError(
            f"The name {actor.name} (namespace={actor.namespace}) is already taken. Please use a different name or get "
            f"the existing actor using ray.get_actor('{actor.name}', namespace='{actor.namespace}')"
        )


def remote(*args: Any, **options: Any) -> Any:
    """Stands in for `ray.remote`, of a class."""
    if args:
        return ActorClass(args[0], options)
    return lambda cls: ActorClass(cls, options)


def method(**options: Any) -> Callable[[Any], Any]:
    def mark(function: Any) -> Any:
        for name, value in options.items():
            setattr(function, f"__ray_{name}__", value)
        return function

    return mark


class ActorHandle:
    """A process's handle of an actor. When the last one is gone, the actor ends."""

    def __init__(self, actor: Actor, worker: Worker | None, *, is_counted: bool = True) -> None:
        """`worker`: the process that has it. None: it is in a message."""
        self._actor = actor
        self._worker = worker
        self._is_counted = is_counted
        if is_counted:
            actor.hold() if worker is None else worker.hold(actor)

    def __getattr__(self, name: str) -> ActorMethod:
        if name.startswith("__"):
            raise AttributeError(name)
        function = getattr(self._actor.metadata.modified_class, name)
        return ActorMethod(self, name, function, getattr(function, "__ray_num_returns__", None))

    def __hash__(self) -> int:
        return hash(int(self._actor.id[:12], 16))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ActorHandle) and other._actor is self._actor

    def __repr__(self) -> str:
        return f"Actor({self._actor.class_name})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (note(ActorHandle(self._actor, None)),)

    def __del__(self) -> None:
        if self._is_counted and kernel.the_world is self._actor.cluster.world:
            self._actor.drop() if self._worker is None else self._worker.drop(self._actor)


def _received(place: int) -> ActorHandle:
    return ActorHandle(noted(place)._actor, here())


class ActorMethod:
    def __init__(self, handle: ActorHandle, name: str, function: Any, num_returns: Any) -> None:
        self._handle = handle
        self._name = name
        self._function = function
        self._num_returns = num_returns

    def options(self, *, num_returns: Any = None) -> ActorMethod:
        return ActorMethod(self._handle, self._name, self._function, num_returns)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        worker = here()
        actor = self._handle._actor
        view = worker.view(actor)
        entry = Entry(worker) if self._num_returns in (None, 1) else None
        stream = Stream() if self._num_returns == "streaming" else None
        group = getattr(self._function, "__ray_concurrency_group__", DEFAULT_GROUP)
        call = Call(view, self._name, group, Arguments(args, kwargs), entry, stream)
        worker.cluster.tell_message(call, repr(actor))
        worker.cluster.pass_boundary(Boundary.BEFORE, call)
        if (error := worker.cluster.raised_at(Boundary.BEFORE, call)) is not None:
            raise error
        if entry is not None or stream is not None:
            call.keeps = ActorHandle(actor, worker)
        view.make(call)
        worker.cluster.world.pause()
        if stream is not None:
            return ObjectRefGenerator(stream)
        return None if entry is None else ObjectRef(entry)


class Incarnation:
    """A process that runs an actor. After a restart it is another one."""

    def __init__(self, actor: Actor, node: Node) -> None:
        cluster = actor.cluster
        self.actor = actor
        self.node = node
        self.process = cluster.world.process(repr(actor), cluster.environment)
        node.host(self.process)
        self.worker = cluster.connect(self.process, node, actor.job, self)
        self.instance: Any = None
        self.is_leaving = False
        """Whether it was asked to end when its calls have ended."""
        self.num_running = 0
        self._has_failed = False
        """Whether `__init__` has raised an error, and the process goes on nevertheless."""
        self._groups: dict[str, _Group] = {}
        self.process.on_end.append(self._ended)
        cluster.world.start(self.process, "main", self._main)

    def _main(self) -> None:
        """The main thread: creates the instance, and runs handlers of signals."""
        world, actor = self.actor.cluster.world, self.actor
        cls = actor.metadata.modified_class
        try:
            args, kwargs = actor.arguments.unpack()
            instance = cls.__new__(cls)
            self.instance = instance
            instance.__init__(*args, **kwargs)
            del args, kwargs, instance
        except ProcessExit:
            raise
        except BaseException as error:
            failure = errors.failed_in_init(self._raised(error, "__init__"))
            world.tell(f"fails in __init__: {type(error).__name__}")
            logger = logging.getLogger("ray._raylet")
            told = "Exception raised in creation task: The actor died"
            # not `logger.error`: a simulation without logs has no errors in them
            logger.handle(logger.makeRecord(logger.name, logging.ERROR, __file__, 0, told, (), None))
            actor.gcs.later(actor.cluster.delays.notice(), lambda: self._end_failed(failure))
        else:
            world.tell("is up")
            actor.gcs.later(actor.cluster.delays.network(), lambda: actor.gcs.created(self))
        while True:
            world.park("the end of its process")

    def _end_failed(self, failure: Error) -> None:
        """`__init__` has raised an error: the actor is dead as soon as no call goes on that it has made.

        Until then, Ray takes it for alive, and what it is asked waits.
        """
        gcs = self.actor.gcs
        if self.process.has_ended or self.actor.is_dead:
            return
        if not self.worker.has_calls_under_way():
            gcs.end(self.actor, failure, gracefully=True)
            return
        if not self._has_failed:
            self._has_failed = True
            gcs.created(self)
        gcs.later(_LOOK_S, lambda: self._end_failed(failure))

    def _raised(self, error: BaseException, function: str) -> Error:
        mistakes.note(error, f"{self.process} fails in {function}()")
        return errors.raised(
            error, function, f"ray::{self.actor}", self.process.pid, self.node.ip, actor_id=self.actor.id
        )

    def receive(self, call: Call) -> None:
        """A call has come to this process."""
        if self.is_leaving:
            call.answer(None, errors.cancelled(self.actor))
            return
        if self._has_failed:
            return  # nobody answers, until the process ends
        if call.group not in self._groups:
            self._groups[call.group] = _Group(self, call.group, self.actor.groups[call.group])
        self._groups[call.group].add(call)

    def leave(self) -> None:
        """End when the calls that run have ended, and those that this process has made, but after 5 s at the latest."""
        if self.is_leaving or self.process.has_ended:
            return
        self.is_leaving = True
        for group in self._groups.values():
            group.cancel()
        cluster = self.actor.cluster
        deadline_s = cluster.world.now_s + 5.0

        def look() -> None:
            if self.process.has_ended:
                return
            is_busy = self.num_running or self.worker.has_calls_under_way()
            if self.process.is_stopped or (is_busy and cluster.world.now_s < deadline_s):
                cluster.world.call_later(_LOOK_S, look)
            else:
                cluster.world.kill(self.process, 0)

        cluster.world.call_later(cluster.delays.process_end(), look)

    def kill(self, *, is_orphan: bool = False) -> None:
        """End when Ray's threads in the process run next, which is not while it is stopped.

        `is_orphan`: its owner has ended. Then its raylet sends SIGKILL soon after the request.
        """
        cluster = self.actor.cluster

        def look() -> None:
            if self.process.is_stopped and not self.process.has_ended and not is_orphan:
                cluster.world.call_later(_LOOK_S, look)
            else:
                cluster.world.kill(self.process, 1)

        cluster.world.call_later(cluster.delays.process_end(), look)

    def execute(self, call: Call) -> None:
        """Run a call's method on this thread."""
        self.num_running += 1
        value: Any = None
        error: Error | None = None
        try:
            assert call.arguments is not None
            args, kwargs = call.arguments.unpack()
            result = getattr(self.instance, call.what)(*args, **kwargs)
            del args, kwargs
            if call.stream is not None and isinstance(result, GeneratorType):
                self._stream(call, result)
            else:
                value = Packed(result)
            del result
        except ProcessExit:
            raise
        except BaseException as raised:
            error = self._raised(raised, call.what)
            if call.stream is not None:  # Ray sends it as an item
                call.send_item(None, error)
                error = None
        self.num_running -= 1
        call.answer(value, error)

    @staticmethod
    def _stream(call: Call, items: Any) -> None:
        for item in items:
            call.send_item(Packed(item), None)

    def _ended(self, _: Any) -> None:
        """Those who have called it see that their connections are broken."""
        cluster = self.actor.cluster
        if self.node.is_lost:
            return
        for view in self.actor.views:
            if view.in_flight:
                cluster.world.call_later(cluster.delays.broken(), lambda view=view: view.breaks(self))


class _Group:
    """A concurrency group: calls start in the order in which they came, each on one of its threads."""

    def __init__(self, incarnation: Incarnation, name: str, size: int) -> None:
        self._incarnation = incarnation
        self._name = name
        self._size = size
        self._calls: deque[Call] = deque()
        self._idle: list[kernel.Thread] = []
        self._num_threads = 0

    def add(self, call: Call) -> None:
        self._calls.append(call)
        world = self._incarnation.actor.cluster.world
        if self._idle:
            world.unpark(self._idle.pop(0))
        elif self._num_threads < self._size:
            name = f"{self._name}-{self._num_threads}"
            self._num_threads += 1
            world.start(self._incarnation.process, name, self._work)

    def cancel(self) -> None:
        cancelled = errors.cancelled(self._incarnation.actor)
        while self._calls:
            self._calls.popleft().answer(None, cancelled)

    def _work(self) -> None:
        world = self._incarnation.actor.cluster.world
        thread = world.current
        assert thread is not None
        while True:
            while not self._calls:
                self._idle.append(thread)
                world.park(f"a call of group {self._name}")
            self._incarnation.execute(self._calls.popleft())
