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
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

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


def actor_class(plain: Callable[P, T], **options: Any) -> ActorClass[P, T]:
    """The class that Ray starts, with Ray's options for all its actors. Actors are never restarted by Ray."""
    return _ray.remote(max_restarts=0, **options)(plain)


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


def wait(
    refs: Sequence[ObjectRef[R]], num_returns: int = 1, timeout_s: float | None = None
) -> tuple[list[ObjectRef[R]], list[ObjectRef[R]]]:
    """The calls that have ended, in whatever way, and the others; returns once `num_returns` have, or at the time-out."""
    return _ray.wait(list(refs), num_returns=num_returns, timeout=timeout_s)


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


def is_connected() -> bool:
    """Whether this process is connected to a Ray cluster."""
    return _ray.is_initialized()


def node_id() -> str:
    """The id of the Ray node on which this process runs, in hexadecimal."""
    return _ray.get_runtime_context().get_node_id()


def node_ip() -> str:
    """The address under which other nodes reach this one."""
    return _ray.util.get_node_ip_address()


def on_node(node_id: str) -> NodeAffinitySchedulingStrategy:
    """Ray's `scheduling_strategy` for exactly this node."""
    return NodeAffinitySchedulingStrategy(node_id, soft=False)


def in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    """Ray's `scheduling_strategy` for one bundle of a placement group."""
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
