"""The functions of Ray that raycore uses, with the types that Ray's own annotations lack.

An actor is a plain class whose public methods are decorated with `endpoint`. `actor_class` turns it into the class that
Ray starts. The handle of an actor is typed as the plain class, so a type checker checks a call's arguments and result::

    class Counter:
        @endpoint("io")
        def add(self, amount: int) -> int: ...

    counter = actor_class(Counter, concurrency_groups={"io": 1}).remote()
    get(counter.add.remote(2))  # an int
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, UnserializableException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from raycore import same_copy
from raycore.node.processes import end_with_parent
from raycore.system import Future, asyncio, os

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
RefT = TypeVar("RefT", bound="ObjectRef[Any] | Iterator[ObjectRef[Any]]")

_ray: Any = ray
"""Untyped on purpose: this module provides the types."""


class ActorMethod(Protocol[P, R]):
    """An actor's method. It can be called directly in the actor's own process, and with `remote` from any other."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the method in this process."""
        ...

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call the method in the actor's process. Returns a ref to its result at once: see `endpoint(replies=...)`."""
        ...


class ActorClass(Protocol[P, T_co]):
    """A class made by `actor_class`, whose instances are Ray actors."""

    def options(self, **options: Any) -> ActorClass[P, T_co]:
        """This class with Ray's options for the actor to start, such as `name` and `num_cpus`."""
        ...

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Start an actor. Returns its handle at once."""
        ...


def endpoint(
    group: str | None = None, *, replies: bool = True
) -> Callable[[Callable[Concatenate[Any, P], R]], ActorMethod[P, R]]:
    """Decorator that makes a method callable as an actor's endpoint.

    Args:
        group: the concurrency group whose threads run the method. None: the default group.
        replies: whether callers learn when a call has ended. Otherwise `remote` returns no ref, and Ray makes no object
            for the result, which delays what the method has begun by some 100 µs.
    """
    options: dict[str, Any] = {} if group is None else {"concurrency_group": group}
    return _ray.method(**options) if replies else _ray.method(num_returns=0, **options)


def actor_class(plain: Callable[P, T], *, max_restarts: int = 0, **options: Any) -> ActorClass[P, T]:
    """Turn a plain class into a class whose instances are Ray actors.

    Their calls leave no task events. Ray's GCS would keep 1 to 2 KB for each call, at the cost of the events of the
    cluster's other jobs. The dashboard's and the state API's lists of actors don't need them.

    Args:
        plain: the class with the endpoints. Ray's tools show its name.
        max_restarts: how often Ray restarts an actor that died. -1: without limit.
        options: Ray's options for all actors of this class.
    """
    actor: Any = _ray.remote(max_restarts=max_restarts, enable_task_events=False, **options)(plain)
    exported = actor.__ray_metadata__
    # Ray exports this class to the workers. They unpickle the base first, which decides what they import
    exported.modified_class = types.new_class(exported.class_name, (_Loaded(exported.modified_class),))
    return actor


def checked(value: T) -> T:
    """`value`, to pass to an actor's constructor. A process that runs another copy of raycore doesn't unpickle it."""
    return value if value is None else cast(T, _Loaded(value))


class _Loaded:
    """A value that other processes unpickle by `same_copy.load`. If it is a class, others can derive from it."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[Any]:
        return (self._value,)

    def __reduce__(self) -> tuple[Any, ...]:
        public = [name for name in dir(self._value) if not name.startswith("_")]
        return same_copy.load, (same_copy.own_copy(), _ray.cloudpickle.dumps(self._value), public)


_ray.cloudpickle.register_pickle_by_value(same_copy)

FromDriversCopy = cast(type[object], _Loaded(object))
"""A base for classes that Ray's libraries pickle: their processes import the driver's copy of raycore, too."""


def get(ref: ObjectRef[R], timeout_s: float | None = None) -> R:
    """Wait for a call's result. `timeout_s=None` waits without limit.

    Raises:
        RayTaskError: the call raised an exception, which the RayTaskError wraps. See `cause_of`.
        RayActorError: the actor has died.
        GetTimeoutError: the result did not arrive within `timeout_s`.
    """
    return _ray.get(ref, timeout=timeout_s)


class _WarnedOnThreads:
    """Ray's note that it has warned of a blocking `get` in this process's async actor: yes, for all but event loops.

    The warning says that the call blocks the event loop. Ray gives it on other threads, too, which wait so that the
    loop need not, and users take it for theirs.
    """

    def __bool__(self) -> bool:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return True
        return False


def warn_of_blocked_loops_only() -> None:
    """Have Ray warn of a blocking `get` in an async actor only where it blocks an event loop."""
    worker: Any = _ray._private.worker
    if not worker.blocking_get_inside_async_warned:
        worker.blocking_get_inside_async_warned = _WarnedOnThreads()


def get_all(refs: Sequence[ObjectRef[R]], timeout_s: float | None = None) -> list[R]:
    """Wait for the results of several calls, in the order of `refs`. Raises the errors of `get()`."""
    return _ray.get(list(refs), timeout=timeout_s)


def wait(refs: Sequence[RefT], num_returns: int = 1, timeout_s: float | None = None) -> tuple[list[RefT], list[RefT]]:
    """Wait until `num_returns` calls have completed or failed, at most `timeout_s` seconds.

    Returns: at most `num_returns` refs of calls that have completed or failed, and all other refs.
    """
    return _ray.wait(list(refs), num_returns=num_returns, timeout=timeout_s)


def as_argument(ref: ObjectRef[R]) -> R:
    """A ref, typed as its value, to pass to another call. Ray waits for the value and passes it instead of the ref."""
    return cast(R, ref)


def has_ended(error: BaseException | None) -> bool:
    """Whether a call has failed because its actor has ended, and not because of its method or of a timeout.

    Some of Ray's reasons, such as `OutOfMemoryError`, are no `RayActorError`. And an exception of the method that can't
    be unpickled here comes as an `UnserializableException`, which is no `RayTaskError`.
    """
    if isinstance(error, (RayTaskError, GetTimeoutError, UnserializableException)):
        return isinstance(error, RayActorError)
    return isinstance(error, RayError)


def cause_of(error: RayError) -> BaseException:
    """The original exception of a call, or `error` itself if Ray could not transfer it."""
    cause: Any = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


MAX_STREAMED = 10_000
"""How many items a call of a generator method yields, before it ends and `Stream` makes the next call: for each item of
a call that has not ended, Ray keeps about 100 bytes in the caller's process and 40 in the actor's."""


class Stream(Generic[R]):
    """The items of an actor's generator method: a ref for each, as soon as the item is available.

    The method is called again whenever a call has yielded `MAX_STREAMED` items, and then goes on where that call ended.
    A call that yields fewer is the last one.
    """

    def __init__(self, method: ActorMethod[P, Iterator[R]], *args: P.args, **kwargs: P.kwargs) -> None:
        untyped: Any = method
        self._begin: Callable[[], Iterator[ObjectRef[R]]] = lambda: untyped.options(num_returns="streaming").remote(
            *args, **kwargs
        )
        self._call = self._begin()
        self._num_left = MAX_STREAMED
        self._late: ObjectRef[R] | None = None
        """The next item, if its value isn't here yet."""

    @property
    def call(self) -> Iterator[ObjectRef[R]]:
        """The call that yields the next item, for `wait()`."""
        if self._num_left == 0:
            self._call, self._num_left = self._begin(), MAX_STREAMED
        return self._call

    def __iter__(self) -> Iterator[ObjectRef[R]]:
        return self

    def __next__(self) -> ObjectRef[R]:
        ref = next(self.call)
        self._num_left -= 1
        return ref

    def next_or_tell(self, told: Callable[[Future[R]], object]) -> R | None:
        """The next item, if it is here. Otherwise None, and `told` is called when it is, or the stream has ended.

        Other than by `wait()`, the cost doesn't depend on how many streams are waited for. `told` gets what `take()`
        needs. It must not wait: it is called on a thread of Ray's.
        """
        call: Any = self.call
        ref, is_known = _ray._private.worker.global_worker.core_worker.peek_object_ref_stream(call._generator_ref)
        if is_known:
            ref = next(self)
            try:
                return get(ref, timeout_s=0)
            except GetTimeoutError:  # large items come later than the news of them
                self._late = ref
        ref.future().add_done_callback(told)
        return None

    def take(self, told: Future[R]) -> R:
        """The item of which `next_or_tell()` has told.

        Raises:
            StopIteration: the method has ended.
            RayError: the method has raised an exception, or its actor has died.
        """
        late, self._late = self._late, None
        ref = next(self) if late is None else late
        return told.result() if told.exception() is None else get(ref)


def kill(actor: object) -> None:
    """End an actor's process, and don't let Ray restart it. Does nothing if the actor is dead already."""
    _ray.kill(actor, no_restart=True)


def find_actor(name: str, namespace: str) -> Any:
    """The handle of a named actor. Raises ValueError if there is none."""
    try:
        return _ray.get_actor(name, namespace)
    except AssertionError as error:  # the job that made it is over: Ray has dropped the class, and not yet the name
        raise ValueError(f"the job of actor {name!r} has ended") from error


def actor_names() -> list[str]:
    """The names of the live actors in this process's namespace."""
    return _ray.util.list_named_actors()


def connect(address: str, **options: Any) -> None:
    """Connect to the cluster at `address`. Raises ConnectionError, RuntimeError or ValueError if that fails."""
    _ray.init(address=address, **options)


TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
"""The environment variable that has a token for Ray's clusters."""


def use_token_of_machine() -> None:
    """Have `connect()` send this user's token, if there is one, to a cluster that this user runs on this machine.

    Ray itself does so only for the address `auto`, but a local Ray requires the token (from Ray 2.59 on).
    """
    from ray._private.authentication import authentication_token_setup

    enable: Any = getattr(authentication_token_setup, "maybe_enable_token_auth_if_token_available", None)
    if enable is not None:
        authentication_token_setup.logger.setLevel(logging.ERROR)  # it warns that it does
        enable(warn_if_disabled=False)


@contextmanager
def token_of_machine(token: str) -> Generator[None, None, None]:
    """While the block runs, have `connect()` send this user's token, as `use_token_of_machine()` does.

    `token`: the one to send if the environment names none. Empty: that in the user's home.
    """
    is_lent = bool(token) and TOKEN_VARIABLE not in os.environ
    if is_lent:
        os.environ[TOKEN_VARIABLE] = token
        _forget_token()
    try:
        use_token_of_machine()
        yield
    finally:
        if is_lent:
            del os.environ[TOKEN_VARIABLE]
            _forget_token()


def _forget_token() -> None:
    """Have Ray read the token anew."""
    from ray._private.authentication import authentication_token_setup

    untyped: Any = authentication_token_setup
    untyped.AuthenticationTokenLoader.instance().reset_cache()


def disconnect() -> None:
    """Disconnect from the cluster. Stops a local Ray that this process has started."""
    _ray.shutdown()


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster."""
    return _ray.is_initialized()


def is_worker() -> bool:
    """Whether this process is a Ray worker, which runs actors and tasks, and not a driver."""
    return _ray.get_runtime_context().worker.mode == _ray.WORKER_MODE


def title_process(name: str) -> None:
    """Have `ps` and Ray's tools show this actor's process as `ray::NAME`. May be called again with another name.

    Ray itself sets the title at each call, to the class and the method, which doesn't tell the actors of a class apart.
    Ray's tools find processes by the prefix. Does nothing in a process that isn't one of Ray's workers.
    """
    if _ray._private.worker.global_worker.mode == _ray.WORKER_MODE:
        _set_title(f"ray::{name}")
        _ray._raylet.setproctitle = _keep_title


def end_with_raylet() -> None:
    """Have the kernel kill this actor's process when the raylet of its node ends.

    Ray's workers notice that themselves, but not while they are stopped, and some hang then. Does nothing in a process
    that isn't one of Ray's workers.
    """
    if _ray._private.worker.global_worker.mode == _ray.WORKER_MODE:
        end_with_parent()


_set_title: Callable[[str], None] = _ray._raylet.setproctitle


def _keep_title(title: str) -> None:
    """Takes the place of Ray's function, which is called before and after each call of an actor."""


def own_actor() -> object:
    """The handle of the actor that runs in this process."""
    return _ray.get_runtime_context().current_actor


def own_actor_id() -> str | None:
    """The id, in hexadecimal, of the actor that runs in this process. None if the process runs no actor."""
    return _ray.get_runtime_context().get_actor_id()


def own_worker_id() -> str:
    """Ray's id, in hexadecimal, of this process."""
    return _ray.get_runtime_context().get_worker_id()


def is_worker_alive(worker_id: str) -> bool:
    """Whether a process of the cluster runs, as far as Ray knows. Ray doesn't note the end of those of a lost node."""
    rays = _ray._private.state
    encoded = rays.state._connect_and_get_accessor().get_worker_info(_ray.WorkerID.from_hex(worker_id))
    return encoded is not None and rays.gcs_pb2.WorkerTableData.FromString(encoded).is_alive


def own_actor_name() -> str:
    """The name of the actor that runs in this process; empty if it has none."""
    return _ray.get_runtime_context().get_actor_name() or ""


def own_job() -> tuple[str, str | None]:
    """The id of this process's job, in hexadecimal, and the id that it was submitted with, if it was submitted."""
    config: Any = _ray._private.worker.global_worker.core_worker.get_job_config()
    return _ray.get_runtime_context().get_job_id(), config.metadata.get("job_submission_id")


def own_resources() -> dict[str, float]:
    """The resources that the actor or task of this process holds: amounts by name. Empty in a driver.

    Those of a placement group, which Ray calls `CPU_group_…`, aren't among them.
    """
    if not is_worker():
        return {}
    held: dict[str, float] = _ray.get_runtime_context().get_assigned_resources()
    return {name: amount for name, amount in held.items() if amount > 0 and "_group_" not in name}


def own_gpus() -> list[str]:
    """The GPUs that Ray has assigned to the actor or task of this process, as in CUDA_VISIBLE_DEVICES.

    Ray sets that variable accordingly, unless RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES is set.
    """
    if not is_worker():
        return []
    assigned: list[str] = _ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return sorted(assigned, key=lambda gpu: (len(gpu), gpu))


def own_group(*, captures: bool) -> PlacementGroup | None:
    """The placement group in which the actor or task of this process runs. None: it runs in none.

    `captures`: only if what the actor or task starts runs there, too (`placement_group_capture_child_tasks`).
    """
    if not is_worker():
        return None
    if captures and not _ray.get_runtime_context().should_capture_child_tasks_in_placement_group:
        return None
    return _ray.util.get_current_placement_group()


def cluster_address() -> str:
    """The `host:port` of the cluster's global control store (GCS)."""
    return _ray.get_runtime_context().gcs_address


def logs_dir() -> Path:
    """The directory of Ray's log files on this node."""
    context = _ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def metrics_port(node_id: str) -> int:
    """The port at which a node exports metrics. 0 or less if the node exports none or is not in the cluster."""
    return next((node["MetricsExportPort"] for node in _ray.nodes() if node["NodeID"] == node_id), 0)


def node_id() -> str:
    """The id of the Ray node on which this process runs, in hexadecimal."""
    return _ray.get_runtime_context().get_node_id()


def raylet_socket() -> str:
    """The path of the Unix socket at which this node's daemon, the raylet, takes connections."""
    return _ray._private.worker.global_worker.node.raylet_socket_name


def node_ip() -> str:
    """The IP address at which other nodes reach this node."""
    return _ray.util.get_node_ip_address()


def on_node(node_id: str, *, soft: bool = False) -> NodeAffinitySchedulingStrategy:
    """Ray's `scheduling_strategy` to start an actor on a node.

    `soft`: start the actor on another node if this one is gone, or is too small even when idle.
    """
    return NodeAffinitySchedulingStrategy(node_id, soft=soft)


def amounts(bundle: Mapping[str, float]) -> dict[str, Any]:
    """Ray's options for an actor that reserves these amounts. Memory isn't among them."""
    others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU", "memory")}
    return {"num_cpus": bundle.get("CPU", 0.0), "num_gpus": bundle.get("GPU", 0.0), "resources": others}


def in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Ray's `scheduling_strategy` to start an actor in one bundle of a placement group."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
