"""Ray's functions with the types that Ray's own annotations lack, and one spelling for what raycore does with Ray.

An actor is a plain class whose public methods are decorated with `endpoint`; `actor_class` makes the class that Ray
starts. A handle of such an actor is typed as the plain class, so that a call's arguments and result are checked::

    class Counter:
        @endpoint("io")
        def add(self, amount: int) -> int: ...

    counter = actor_class(Counter, concurrency_groups={"io": 1}).remote()
    get(counter.add.remote(2))  # an int
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.exceptions import RayTaskError
    from ray.util.placement_group import PlacementGroup

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
RefT = TypeVar("RefT", bound="ObjectRef[Any] | Iterator[ObjectRef[Any]]")

_ray: Any = ray
"""Untyped on purpose: this module gives the types."""


class Endpoint(Protocol[P, R]):
    """An actor's method. Called in its own process it is a plain method; `remote` calls it from another one."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it in this process."""
        ...

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> ObjectRef[R]:
        """Call it in the actor's process. Returns at once."""
        ...


class ActorClass(Protocol[P, T_co]):
    """What Ray starts actors of."""

    def options(self, **options: Any) -> ActorClass[P, T_co]:
        """The same with Ray's options for one actor, such as `name` and `num_cpus`."""
        ...

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> T_co:
        """Start an actor. Returns its handle at once."""
        ...


def endpoint(group: str | None = None) -> Callable[[Callable[Concatenate[Any, P], R]], Endpoint[P, R]]:
    """Make a method an actor's endpoint, run by the threads of a concurrency group. None: the default group."""
    return _ray.method(concurrency_group=group) if group is not None else _ray.method()


def actor_class(plain: Callable[P, T], *, max_restarts: int = 0, **options: Any) -> ActorClass[P, T]:
    """The class that Ray starts, with Ray's options for all its actors.

    Args:
        plain: the class that has the endpoints. Ray shows its name.
        max_restarts: how often Ray starts an actor that has died again; -1: always.
    """
    return _ray.remote(max_restarts=max_restarts, **options)(plain)


def get(ref: ObjectRef[R], timeout_s: float | None = None) -> R:
    """A call's result.

    Raises:
        RayTaskError: what the call raised, as Ray wraps it.
        RayActorError: the actor is gone.
        GetTimeoutError: there is no result within `timeout_s`.
    """
    return _ray.get(ref, timeout=timeout_s)


def get_all(refs: Sequence[ObjectRef[R]], timeout_s: float | None = None) -> list[R]:
    """The results of several calls, in order. Raises as `get()` does, for the first that fails."""
    return _ray.get(list(refs), timeout=timeout_s)


def wait(refs: Sequence[RefT], num_returns: int = 1, timeout_s: float | None = None) -> tuple[list[RefT], list[RefT]]:
    """The calls that have ended, in whatever way, and the others. Waits for `num_returns`, at most `timeout_s`."""
    return _ray.wait(list(refs), num_returns=num_returns, timeout=timeout_s)


def as_argument(ref: ObjectRef[R]) -> R:
    """A call's result as the argument of another call. Ray hands over the value once it is there."""
    return cast(R, ref)


def cause_of(error: RayTaskError) -> BaseException:
    """What a call raised, as it was raised; `error` itself where Ray could not bring it."""
    cause: Any = error.cause  # pyright: ignore[reportUnknownMemberType]
    return cause if isinstance(cause, BaseException) else error


def stream(method: Endpoint[P, Iterator[R]], *args: P.args, **kwargs: P.kwargs) -> Iterator[ObjectRef[R]]:
    """Call a method that yields. Each of its results comes as a ref of its own, as soon as it is there."""
    untyped: Any = method
    return untyped.options(num_returns="streaming").remote(*args, **kwargs)


def kill(actor: object) -> None:
    """End an actor's process at once. One that is gone already is no error."""
    _ray.kill(actor, no_restart=True)


def find_actor(name: str, namespace: str) -> Any:
    """The handle of a named actor. Raises ValueError if there is none."""
    return _ray.get_actor(name, namespace)


def actor_names() -> list[str]:
    """The names of the actors in this process's namespace."""
    return _ray.util.list_named_actors()


def connect(address: str, **options: Any) -> None:
    """Join the cluster at `address`. Raises ConnectionError, RuntimeError or ValueError when that can't be done."""
    _ray.init(address=address, **options)


def disconnect() -> None:
    """Leave the cluster. A local Ray that this process has started ends."""
    _ray.shutdown()


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster."""
    return _ray.is_initialized()


def is_worker() -> bool:
    """Whether this process is one in which Ray runs actors and tasks, not a job's own program."""
    return _ray.get_runtime_context().worker.mode == _ray.WORKER_MODE


def own_actor() -> object:
    """The handle of the actor whose process this is."""
    return _ray.get_runtime_context().current_actor


def own_actor_id() -> str | None:
    """The id of the actor whose process this is, in hexadecimal; None where it is no actor's."""
    return _ray.get_runtime_context().get_actor_id()


def cluster_address() -> str:
    """The `host:port` of the cluster's store (GCS)."""
    return _ray.get_runtime_context().gcs_address


def logs_dir() -> Path:
    """The folder of this node's log files."""
    context = _ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs")


def metrics_port(node_id: str) -> int:
    """The port at which a node exports metrics; 0 or less where it exports none, or is not in the cluster."""
    return next((node["MetricsExportPort"] for node in _ray.nodes() if node["NodeID"] == node_id), 0)


def node_id() -> str:
    """The id of the Ray node on which this process runs, in hexadecimal."""
    return _ray.get_runtime_context().get_node_id()


def node_ip() -> str:
    """The address under which other nodes reach this one."""
    return _ray.util.get_node_ip_address()


def on_node(node_id: str, *, soft: bool = False) -> NodeAffinitySchedulingStrategy:
    """Ray's `scheduling_strategy` for a node. `soft`: another node will do where this one is gone."""
    return NodeAffinitySchedulingStrategy(node_id, soft=soft)


def bundle_of(group: PlacementGroup, index: int) -> dict[str, float]:
    """What one bundle of a placement group holds: amounts by resource."""
    untyped: Any = group
    return dict(untyped.bundle_specs[index])


def in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Ray's `scheduling_strategy` for one bundle of a placement group."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
