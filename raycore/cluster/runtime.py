"""What runs ranks: all that their manager, their monitors and their standbys need of Ray, of processes and of time.

`RayRuntime` is the real one. The decisions of those who use it are tested with another one, without Ray.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from placement.plan import EngineShape
from placement.reserve import RankBundles
from placement.topology import draining_nodes
from raycore import ray_api
from raycore.cluster.clock import Clock
from raycore.cluster.connection import acquire_ray, release_ray
from raycore.cluster.given import GivenDevices
from raycore.cluster.logs import with_last_lines
from raycore.cluster.own_node import OwnNode
from raycore.cluster.owner import ended_with_owner, this_owner
from raycore.cluster.process_watch import Ends
from raycore.cluster.rank import Rank
from raycore.config import EngineConfig
from raycore.engine.engine_actor import DP_ENGINE_CORE_ACTOR, DPEngineCoreActor
from raycore.errors import EngineDeadError
from raycore.node.ports import takes_connections
from raycore.node.processes import send_signal, wait_until_gone
from raycore.ray_api import checked, in_bundle, on_node
from raycore.same_copy import own_copy
from raycore.status import EngineOwner
from raycore.system import os
from raycore.worker.rank import RankIdentity

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.util.placement_group import PlacementGroup

    from raycore.ray_api import ActorClass

    RankActorClass = ActorClass[[bytes, RankIdentity, RankBundles | None, str], DPEngineCoreActor]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Connection(NamedTuple):
    """This process's connection to a Ray cluster."""

    node: str
    """The id of the node on which this process runs."""
    address: str
    """The address of the cluster."""
    is_ours: bool
    """Whether raycore has started the cluster for this process."""


class RankWatch(Protocol):
    """Watches ranks until one of them ends. `close()` must be called afterwards."""

    def wait(self, timeout_s: float) -> EngineDeadError | None:
        """Wait until any of the ranks ends. Returns an error that says which one, or None after `timeout_s` seconds."""
        ...

    def explain(self, error: EngineDeadError) -> EngineDeadError:
        """Return a result of `wait()` with what Ray says of the cause, if it says something within a second."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


class NodeWatch(Protocol):
    """Watches a node until it ends. `close()` must be called afterwards."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until the node has ended, at most `timeout_s` seconds. Returns whether it has."""
        ...

    def close(self) -> None:
        """Stop watching."""
        ...


class Runtime(Protocol):
    """Creates ranks, waits for their answers, watches them, and ends them."""

    clock: Clock

    def connect(self, num_cpus: float) -> Connection:
        """Connect to Ray, with `disconnect()` to follow. `num_cpus`: what a cluster needs that is started for this."""
        ...

    def disconnect(self) -> None:
        """Undo one `connect()`."""
        ...

    def is_connected(self) -> bool:
        """Whether this process is connected to Ray, and Ray's control store takes connections. Takes at most a second.

        Without the control store, most calls of Ray wait until it is back.
        """
        ...

    def own_gpus(self) -> list[str]:
        """The GPUs that Ray has assigned to this process's actor or task, as in CUDA_VISIBLE_DEVICES."""
        ...

    def own_group(self, *, captures: bool) -> PlacementGroup | None:
        """The placement group in which this process's actor or task runs. None: it runs in none.

        `captures`: only if what it starts runs there, too.
        """
        ...

    def create(
        self,
        name: str,
        config: EngineConfig,
        identity: RankIdentity,
        bundles: RankBundles | GivenDevices,
        shape: EngineShape,
    ) -> DPEngineCoreActor:
        """Create a rank's actor: in its bundle, which is one of those of `shape`, or on the devices' node, where it
        reserves nothing. Returns at once."""
        ...

    def create_standby(self, name: str, config: EngineConfig, node_id: str) -> DPEngineCoreActor:
        """Create, on a node, an actor that isn't any rank yet and reserves nothing. Returns at once."""
        ...

    def wait(
        self, refs: Sequence[ObjectRef[T]], num_returns: int = 1, timeout_s: float | None = None
    ) -> tuple[list[ObjectRef[T]], list[ObjectRef[T]]]:
        """Wait until `num_returns` calls have completed or failed, at most `timeout_s` seconds.

        Returns: at most `num_returns` refs of calls that have completed or failed, and all other refs.
        """
        ...

    def get(self, ref: ObjectRef[T], timeout_s: float | None = None) -> T:
        """Wait for a call's result. Raises a RayError if the call has failed, or didn't complete within `timeout_s`."""
        ...

    def end(self, actor: object) -> None:
        """Have Ray end an actor. Doesn't wait until it has ended."""
        ...

    def send_signal(self, pids: Iterable[int], number: int) -> None:
        """Send signal `number` to each of these processes of this node that has not ended."""
        ...

    def wait_until_gone(self, pids: Iterable[int], timeout_s: float) -> list[int]:
        """Wait until processes of this node have ended, at most `timeout_s` seconds. Returns those that still run."""
        ...

    def watch(self, ranks: Sequence[Rank], own_node: str) -> RankWatch:
        """Watch ranks, from the node `own_node`. One that isn't up isn't watched."""
        ...

    def owner(self) -> EngineOwner:
        """What engines of this process belong to. This process must be connected."""
        ...

    def ended_with_owner(self) -> bool:
        """Whether the actor to which the engine belongs has ended. If so, the engine ends, too."""
        ...

    def watch_own_node(self) -> NodeWatch:
        """Watch the Ray node on which this process runs."""
        ...

    def end_worker(self) -> None:
        """End this process if it is one of Ray's workers, whose node has ended: Ray leaves some of them for minutes."""
        ...

    def draining_nodes(self) -> set[str]:
        """The ids of the nodes that Ray is draining. Waits as long as Ray's control store doesn't answer."""
        ...

    def with_last_lines(self, cause: str, pid: int | None, node_id: str | None) -> str:
        """`cause`, and the last lines that the dead process logged, if it is known and its log can be read."""
        ...


class RayRuntime:
    """Ranks are Ray actors."""

    def __init__(self, actor_cls: RankActorClass = DP_ENGINE_CORE_ACTOR) -> None:
        """`actor_cls`: the Ray actor class of the ranks."""
        self._actor_cls = actor_cls
        self.clock = Clock()

    def connect(self, num_cpus: float) -> Connection:
        self.clock.start_thread("raycore-own-copy", own_copy)  # the sources are read while Ray starts
        is_ours = acquire_ray(num_cpus)
        ray_api.warn_of_blocked_loops_only()
        return Connection(ray_api.node_id(), ray_api.cluster_address(), is_ours)

    def is_connected(self) -> bool:
        return ray_api.is_connected() and takes_connections(ray_api.cluster_address())

    def watch_own_node(self) -> OwnNode:
        return OwnNode(ray_api.raylet_socket())

    def end_worker(self) -> None:
        if ray_api.is_worker():
            logger.error("this process ends: the Ray node that it belongs to has ended")
            os._exit(1)

    def create(
        self,
        name: str,
        config: EngineConfig,
        identity: RankIdentity,
        bundles: RankBundles | GivenDevices,
        shape: EngineShape,
    ) -> DPEngineCoreActor:
        if isinstance(bundles, GivenDevices):
            return self._start_on(bundles.node_id, name, config, replace(identity, gpu_ids=bundles.ids))
        index = shape.engine_bundle_index
        # without a bundle of its own, it hosts the worker or is beside the first one
        is_beside_worker = shape.engine_cpus == 0 and config.executor.backend != "inline"
        options = {
            **ray_api.amounts({} if is_beside_worker else shape.bundles[index]),
            "scheduling_strategy": in_bundle(bundles.group, bundles.indices[index]),
        }
        return self._start(name, config, identity, bundles, options)

    def create_standby(self, name: str, config: EngineConfig, node_id: str) -> DPEngineCoreActor:
        return self._start_on(node_id, name, config, RankIdentity(-1, 1))

    def _start_on(self, node_id: str, name: str, config: EngineConfig, identity: RankIdentity) -> DPEngineCoreActor:
        """Create an actor that reserves nothing."""
        options = {"num_cpus": 0, "scheduling_strategy": on_node(node_id)}
        return self._start(name, config, identity, None, options)

    def _start(
        self,
        name: str,
        config: EngineConfig,
        identity: RankIdentity,
        bundles: RankBundles | None,
        options: dict[str, Any],
    ) -> DPEngineCoreActor:
        actor_cls = self._actor_cls.options(name=name, **options)
        return actor_cls.remote(config.encode(), checked(identity), checked(bundles), name)

    own_gpus = staticmethod(ray_api.own_gpus)
    own_group = staticmethod(ray_api.own_group)
    disconnect = staticmethod(release_ray)
    wait = staticmethod(ray_api.wait)
    get = staticmethod(ray_api.get)
    end = staticmethod(ray_api.kill)
    send_signal = staticmethod(send_signal)
    wait_until_gone = staticmethod(wait_until_gone)
    watch = staticmethod(Ends)
    owner = staticmethod(this_owner)
    ended_with_owner = staticmethod(ended_with_owner)
    draining_nodes = staticmethod(draining_nodes)
    with_last_lines = staticmethod(with_last_lines)
