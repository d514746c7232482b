"""Starts and stops an engine's ranks, each in its own placement group.

Owns the ranks' actors and the engine's connection to Ray, which a `Runtime` makes. `Reservations` decides where
ranks run. The supervisor decides when to start, replace or stop them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast, get_args

import msgspec
from ray.util.placement_group import PlacementGroup

from placement.plan import EngineShape
from placement.reserve import RankBundles
from placement.topology import read_cluster
from raycore.cluster.desired import Desired, DesiredNow, DesiredWeights
from raycore.cluster.device import choose_device
from raycore.cluster.equal_kernels import unequal_kernels
from raycore.cluster.following import Following, HeldAdapters, Loops
from raycore.cluster.given import GivenDevices, GivenPlaces, find_given
from raycore.cluster.rank import Rank, workers_by_node
from raycore.cluster.rank_ends import RankEnds
from raycore.cluster.rank_starts import OnProgress, RankStarts
from raycore.cluster.reservations import OnShortage, Placement, Reservations
from raycore.cluster.runtime import Runtime
from raycore.cluster.standby import NoStandbys, Standbys
from raycore.config import DType, EngineConfig
from raycore.config.rank_checks import check_num_ranks
from raycore.errors import InitializationError
from raycore.kernels import are_compiled
from raycore.messages import FIRST_WEIGHTS, EngineInfo
from raycore.node.resources import total_memory_bytes
from raycore.parts.servers.cluster.servers import servers_of
from raycore.parts.weights.cluster import EngineWeights
from raycore.ray_api import as_argument
from raycore.status import EngineOwner, describe_owner
from raycore.system import secrets, threading
from raycore.worker.rank import RankIdentity

if TYPE_CHECKING:
    from raycore.engine.engine_actor import DPEngineCoreActor

logger = logging.getLogger(__name__)

_NEXT_STANDBY_S = 0.5
"""The longest delay before standbys are started after ranks were replaced or added."""


def shape_of(config: EngineConfig, given: GivenPlaces | None = None) -> EngineShape:
    """The resources that `config` needs from the cluster, or in places that the caller gives."""
    is_inline, is_on_gpus = config.executor.backend == "inline", config.device == "cuda"
    has_only_places_of_workers = given is not None and given.has_only_places_of_workers
    others = dict(config.parallel.resources_per_worker or {})
    # the caller's trainers may hold all CPUs of their bundles
    cpus = others.pop("CPU", 0.0 if has_only_places_of_workers and is_on_gpus else 1.0)
    gpus = others.pop("GPU", config.parallel.gpus_per_worker)
    return EngineShape(
        num_ranks=config.parallel.data_parallel_size,
        world_size=config.parallel.world_size,
        cpus_per_worker=cpus,
        gpus_per_worker=gpus if is_on_gpus else 0.0,
        others_per_worker=others,
        engine_cpus=0.0 if is_inline or has_only_places_of_workers else min(1.0, cpus),
        strategy=config.parallel.placement_strategy,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
    )


class CoreEngineActorManager:
    """One `DPEngineCoreActor` for each data-parallel rank, each in its own placement group. Thread-safe."""

    def __init__(
        self,
        config: EngineConfig,
        placement_groups: Sequence[PlacementGroup] | None = None,
        *,
        runtime: Runtime,
    ) -> None:
        """Create a manager. `start()` starts the ranks.

        Args:
            placement_groups: one for each rank, created by the caller and never removed by raycore. None: `find_given`
                says what there is instead.
            runtime: what runs the ranks.
        """
        self.engine_id = secrets.token_hex(4)
        self.ranks: dict[int, Rank] = {}
        """The ranks that are up or starting, by dp_rank."""
        self._config = msgspec.structs.replace(config, engine_name=config.engine_name or self.engine_id)
        self._shape = shape_of(config)
        self.first_rank = config.parallel.first_rank
        """The number of rank 0 among those of all servers of a deployment."""
        self.runtime = runtime
        self.reservations = Reservations(config, self.engine_id, self.runtime.clock)
        self._brought_groups = placement_groups
        self._given = GivenPlaces()
        self.node = ""
        """The id of the node on which this process runs; empty before `start()`."""
        self.address = ""
        """The address of the Ray cluster; empty before `start()`."""
        self.owner: EngineOwner | None = None
        """What the engine belongs to; None before `start()`."""
        self._num_created = 0
        self._uses_ray = False
        self._lock = threading.RLock()
        self._is_shut_down = False
        self.stop_timeout_s = config.executor.shutdown_timeout_s
        """Seconds that ranks have to stop at the engine's end, before they are killed."""
        self._first_path, timeout_s = config.model.model, config.executor.init_timeout_s
        self.desired = DesiredNow(
            Desired(DesiredWeights(FIRST_WEIGHTS, self._first_path)), lambda: list(self.ranks.values())
        )
        """What all ranks have to have. Ranks that join are brought to it before they serve."""
        self.servers = servers_of(self._config, runtime)
        """What the ranks share with those of other servers."""
        self.weights = EngineWeights(self.desired, self.runtime, timeout_s, can_copy=not self.shares_experts)
        self._following = Following(
            self.desired,
            [
                Loops(lambda: self.is_lockstep, self.servers.others),
                HeldAdapters(self.runtime, timeout_s, config.lora.num_adapters),
                self.weights,
            ],
        )
        self._starts, self._ends = RankStarts(self.runtime, self.reservations, timeout_s), RankEnds(self.runtime)
        self._standbys: Standbys | NoStandbys = NoStandbys()

    def start(
        self,
        on_progress: OnProgress | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
        join: Callable[[], Callable[[], object]] | None = None,
    ) -> list[EngineInfo]:
        """Place, create and initialize all ranks, in parallel, and start their loops.

        Args:
            on_progress: called a few times a second with the fraction of the weights that is loaded, 0 to 1.
            is_wanted: called several times a second. If it returns False, the start is cancelled.
            join: called once this process is connected to Ray, before anything is reserved. What it returns is called
                if the start fails, while the process is still connected.

        Raises: after everything that was started has been removed:
            InitializationError: a rank failed to start (the message has its traceback), Ray can't be used, or the start
                was cancelled.
            InvalidInput: a rank found the caller's input invalid.
            PlacementShortage: the cluster can't fit the ranks.
            InvalidConfig: the caller's placement groups can't fit the ranks.
        """
        with ExitStack() as undo:
            undo.callback(self.shutdown, timeout_s=0.0)
            self.node, self.address, is_ray_ours = self.runtime.connect(self._shape.num_cpus)
            self._uses_ray = True
            self.owner = self.runtime.owner()
            if join is not None:
                undo.callback(join())
            self._decide_device()
            self._given = find_given(self._config, self._brought_groups, self.node, self.runtime)
            self._shape = shape_of(self._config, self._given)
            self._standbys = self._make_standbys()
            title = f"engine {self._config.engine_name} of {describe_owner(self.owner)}"
            self.reservations.open(self._shape, self.node, is_ray_ours=is_ray_ours, given=self._given, title=title)
            placement = self.reservations.for_new_engine(is_wanted)
            self._check_own_node(placement)
            while not self._have_started(placement, on_progress, is_wanted):
                pass
            undo.pop_all()
        return self.infos

    def _have_started(
        self, placement: Placement, on_progress: OnProgress | None, is_wanted: Callable[[], bool]
    ) -> bool:
        """Start all ranks. Returns False if that failed because of ranks of other servers: they start once more."""
        self._gather(is_wanted)
        with self._lock:
            ranks = self._create(placement)
        try:
            self.confirm(ranks, on_progress, is_wanted)
        except InitializationError as error:
            if not self.servers.begins_anew(str(error)):
                raise
            for rank in ranks:
                self.kill(rank.dp_rank)
            return False
        return True

    def cancel(self) -> None:
        """Cancel a `start()` in progress on another thread, which then raises InitializationError."""
        self._is_shut_down = True
        self.reservations.cancel()

    @property
    def infos(self) -> list[EngineInfo]:
        """The `EngineInfo` of each rank that is up, in rank order."""
        return [rank.info for _, rank in sorted(self.ranks.items()) if rank.info is not None]

    def drain_timeout_s(self, timeout_s: float | None = None) -> float:
        """How long ranks that leave may take to finish their requests: 0 while they are paused, and can't finish any.

        `timeout_s`: otherwise this. None: the option.
        """
        if self.desired.now.activity.is_paused:
            return 0.0
        return self._config.recovery.drain_timeout_s if timeout_s is None else timeout_s

    def confirm(
        self,
        ranks: Sequence[Rank],
        on_progress: OnProgress | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """Wait until new ranks are up, and start their loops.

        Raises the errors of `start()`, but leaves the ranks' processes running.
        """
        deadline_s = self.runtime.clock.now_s() + self._config.executor.init_timeout_s

        def is_still_wanted() -> bool:
            self.servers.check()
            return not self._is_shut_down and is_wanted()

        self._starts.wait(ranks, deadline_s, on_progress, is_still_wanted)
        problem = unequal_kernels(self.infos, are_compiled())
        if problem is not None:
            raise InitializationError(problem)
        self._keep_dtype()
        self._following.follow(ranks, deadline_s, is_still_wanted)
        self._keep_standbys()

    def _keep_standbys(self) -> None:
        """Have standbys on the ranks' nodes, some time from now."""
        # standbys can't replace ranks that span nodes
        nodes = dict.fromkeys(rank.nodes[0] for rank in self.ranks.values() if rank.is_on_one_node)
        first_s = self._config.recovery.standby_delay_s or 0.0
        # after one failure, another one is more likely, so don't wait for the full delay
        is_first = self._num_created <= self._shape.num_ranks
        self._standbys.keep(nodes, self.node, first_s if is_first else min(first_s, _NEXT_STANDBY_S))

    def use_checkpoint(self, path: str) -> None:
        """Have ranks that are created from now on load the weights of another checkpoint."""
        with self._lock:
            self._config = _reading(self._config, path)

    def replace(
        self,
        dp_ranks: Sequence[int],
        is_wanted: Callable[[], bool] = lambda: True,
        on_shortage: OnShortage = lambda missing, nodes: None,
    ) -> list[Rank]:
        """Kill these ranks if they are alive, and create their successors. Call `confirm()` with the returned ranks.

        A successor gets the placement group of the rank that it replaces, if all nodes of that group are alive.
        Otherwise this reserves another group, and waits for it.

        Args:
            is_wanted: called while waiting for a group. If it returns False, the replacement is cancelled.

        Raises:
            PlacementShortage: the cluster couldn't fit all successors in time. No successor was created.
            InitializationError: the replacement was cancelled.
        """
        with self._lock:
            old = [self.ranks[dp_rank] for dp_rank in dp_ranks]
            others = [rank for rank in self.ranks.values() if rank not in old]
            for rank in old:
                self._ends.kill(rank, self.node)
        self.servers.end_round("ranks of a server have ended")
        placement = self.reservations.for_successors(old, is_wanted, others, on_shortage)
        self._gather(is_wanted)
        return self._create_in(placement)

    def grow(self, dp_ranks: Sequence[int], num_blocks: int | None = None) -> list[Rank]:
        """Create additional ranks. Call `confirm()` with the returned ranks.

        `num_blocks`: for ranks that will share experts with those that are up: the size of these ranks' KV cache. They
        load no weights, and join only by `join_group()`.

        Raises: with nothing changed:
            PlacementShortage: the cluster can't fit the additional ranks. Raised at once if even the idle cluster can't
                fit them, otherwise after a wait of 10 s for resources. If `wait_for_nodes_s` is set, raised after a
                wait of that time for nodes.
            InitializationError: the engine was shut down during the call.
        """
        return self._create_in(self.reservations.for_growth(dp_ranks, list(self.ranks.values())), num_blocks)

    def _gather(self, is_wanted: Callable[[], bool]) -> None:
        """Wait until ranks of other servers start together with those that are about to be created."""
        config = self.servers.gather(self._config, lambda: not self._is_shut_down and is_wanted())
        with self._lock:
            self._config = msgspec.structs.replace(self._config, parallel=config.parallel)

    # ---- ranks that share experts

    @property
    def shares_experts(self) -> bool:
        """Whether the ranks share experts, if there are several."""
        return self._config.parallel.enable_expert_parallel

    @property
    def is_lockstep(self) -> bool:
        """Whether there are several ranks, which share experts and therefore run every step together."""
        return self._config.parallel.is_lockstep

    def check_num_ranks(self, num_ranks: int) -> None:
        """Raise InvalidConfig if an option can't be used with this number of ranks, and InvalidCheckpoint if saved
        shares are damaged."""
        check_num_ranks(self._config.with_num_ranks(num_ranks))

    def join_group(self, num_ranks: int) -> None:
        """Let ranks join that have formed a group of `num_ranks` ranks with the others, which gave them their weights.

        No update of weights may begin meanwhile.
        """
        self.resize(num_ranks)
        for rank in self.ranks.values():
            if rank.awaits_group:
                rank.awaits_group = False
                self.weights.keep([rank])
                self._following.join(rank, lambda: not self._is_shut_down)
        self._keep_standbys()

    def resize(self, num_ranks: int) -> None:
        """Let ranks that are created from now on be some of `num_ranks` ranks."""
        with self._lock:  # the checkpoint may change at the same time
            self._config = self._config.with_num_ranks(num_ranks)
        self._standbys.close()  # they would be ranks of the old number
        self._standbys = self._make_standbys()

    def prepare(self, num_ranks: int) -> Placement:
        """Reserve the placement groups that `num_ranks` ranks need in addition to the existing groups.

        Returns: the ranks' bundles in the existing and the new groups, for `restart()`.

        Raises:
            PlacementShortage, InitializationError: as in `grow()`.
        """
        standing = {dp_rank: rank.bundles for dp_rank, rank in self.ranks.items() if rank.bundles is not None}
        added = [dp_rank for dp_rank in range(num_ranks) if dp_rank not in standing]
        return standing | self.reservations.for_growth(added, list(self.ranks.values()))

    def restart(self, placement: Placement, num_ranks: int) -> list[Rank]:
        """Kill all ranks, and create ranks 0 to `num_ranks - 1` as `placement` says. Removes all other groups.

        Call `confirm()` with the returned ranks.
        """
        with self._lock:
            for rank in self.ranks.values():
                self._ends.kill(rank, self.node)
            self.ranks = {dp_rank: rank for dp_rank, rank in self.ranks.items() if dp_rank < num_ranks}
            self.resize(num_ranks)
            self.reservations.release(bundles for dp_rank, bundles in placement.items() if dp_rank >= num_ranks)
            return self._create({dp_rank: placement[dp_rank] for dp_rank in range(num_ranks)})

    def shrink(self, dp_ranks: Sequence[int], timeout_s: float = 0.0) -> None:
        """Stop ranks for good, and remove their placement groups. Ranks that still run after `timeout_s` are killed."""
        with self._lock:
            leaving = [self.ranks[dp_rank] for dp_rank in dp_ranks if dp_rank in self.ranks]
            self.ranks = {dp_rank: rank for dp_rank, rank in self.ranks.items() if rank not in leaving}
        self._end(leaving, timeout_s)

    def _end(self, ranks: Sequence[Rank], timeout_s: float) -> None:
        self._ends.stop(ranks, timeout_s, self.node)
        self.reservations.release(rank.bundles for rank in ranks if rank.bundles is not None)

    def kill(self, dp_rank: int) -> None:
        """Kill a rank's processes. The rank's `run_ref` then completes."""
        with self._lock:
            if dp_rank in self.ranks:
                self._ends.kill(self.ranks[dp_rank], self.node)

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Stop all ranks, remove the placement groups that raycore created, and release Ray. Idempotent.

        Also cleans up after a failed `start()`.

        Args:
            timeout_s: seconds to wait for ranks to stop before they are killed; None: `stop_timeout_s`.
        """
        with self._lock:
            self.stop_ranks(timeout_s)
            if self._uses_ray:
                self._uses_ray = False
                self.runtime.disconnect()

    def stop_ranks(self, timeout_s: float | None = None) -> None:
        """Do what `shutdown()` does, but don't release Ray. For a caller with other threads that still use Ray."""
        with self._lock:
            self.give_back(self.stop_timeout_s if timeout_s is None else timeout_s)
            self.ranks = {}

    def give_back(self, timeout_s: float = 0.0) -> None:
        """End the ranks, which stay listed, and remove the groups. Ranks that run after `timeout_s` are killed."""
        with self._lock:
            was_shut_down, self._is_shut_down = self._is_shut_down, True
            self.reservations.cancel()
            is_connected = self.runtime.is_connected()
            self._standbys.close(without_ray=not is_connected)
            if is_connected:
                self.servers.close()
                self._end(list(self.ranks.values()), timeout_s)
                self.reservations.close()
            elif self.ranks and not was_shut_down:
                logger.warning("Ray at %s is gone: what is left of the ranks ends with this program", self.address)

    # ---- actors

    def _create_in(self, placement: Placement, num_blocks: int | None = None) -> list[Rank]:
        with self._lock:
            if self._is_shut_down:  # shutdown() has removed the groups
                raise InitializationError("the engine was shut down")
            return self._create(dict(sorted(placement.items())), num_blocks)

    def _create(self, placement: Placement, num_blocks: int | None = None) -> list[Rank]:
        """`num_blocks`: see `grow()`."""
        nodes = {dp_rank: bundles.nodes() for dp_rank, bundles in placement.items()}
        standing = {dp_rank: rank.nodes for dp_rank, rank in self.ranks.items()} | nodes
        config = self._config if num_blocks is None else self._config.with_num_ranks(len(standing))
        counts = workers_by_node(standing.values(), self._shape.world_size)
        starts = {
            dp_rank: self._actor(config, dp_rank, bundles, nodes[dp_rank], counts)
            for dp_rank, bundles in placement.items()
        }
        actors = {dp_rank: actor for dp_rank, (actor, _) in starts.items()}
        # the first rank chooses the dtype and provides the rendezvous address; Ray passes both to all ranks
        dtype: DType | None = None
        meeting, first = None, next(iter(actors.values()), None)
        if first is None:
            return []
        if self._config.model.dtype == "auto" and self._config.device == "cpu":
            dtype = self.servers.shared("dtype", lambda: as_argument(first.choose_dtype.remote()))
        if config.parallel.is_lockstep and num_blocks is None:
            meeting = self.servers.shared("meeting", lambda: as_argument(first.rendezvous.remote(dtype)))
        created = [
            Rank(dp_rank, bundles, nodes[dp_rank], actor, actor.wait_for_init.remote(meeting, dtype, num_blocks))
            for (dp_rank, bundles), actor in zip(placement.items(), actors.values(), strict=True)
        ]
        for rank in created:
            rank.engine_node = rank.nodes[self._shape.engine_bundle_index]
            self.weights.loaded(rank, starts[rank.dp_rank][1])
            rank.awaits_group = num_blocks is not None
        # another dict, because other threads go through this one
        self.ranks = self.ranks | {rank.dp_rank: rank for rank in created}
        return created

    def _actor(
        self,
        config: EngineConfig,
        dp_rank: int,
        bundles: RankBundles | GivenDevices,
        nodes: list[str],
        counts: Mapping[str, int],
    ) -> tuple[DPEngineCoreActor, str]:
        """Create an actor. Returns it, and the checkpoint whose weights it will load."""
        name, workers_on = self._name(f"dp{dp_rank}"), {node: counts[node] for node in nodes[: self._shape.world_size]}
        identity = RankIdentity(dp_rank, workers_on[nodes[0]], workers_on=workers_on if len(workers_on) > 1 else {})
        predecessor = self.ranks.get(dp_rank)
        if predecessor is not None and self._can_stand_in(predecessor, nodes):
            standby = self._standbys.take(nodes[0])
            if standby is not None:
                gpu_ids = [] if predecessor.info is None else predecessor.info.gpu_ids
                standby.adopt.remote(msgspec.structs.replace(identity, gpu_ids=gpu_ids), name)
                return standby, self._first_path
        return self.runtime.create(name, config, identity, bundles, self._shape), config.model.model

    def _check_own_node(self, placement: Placement) -> None:
        """If workers run on this node, check its memory and its files for them, before they take time to start.

        Raises InvalidConfig or InvalidCheckpoint.
        """
        nodes = [bundles.nodes()[: self._shape.world_size] for bundles in placement.values()]
        num_workers = sum(own.count(self.node) for own in nodes)
        if num_workers == 0:
            return
        if self._config.device == "cpu":
            self._config.cache.check_memory(num_workers, total_memory_bytes(), "this node")
        self._config.check_files()

    def _can_stand_in(self, rank: Rank, nodes: list[str]) -> bool:
        """Whether a standby can replace a rank, on these nodes. On GPUs, it has to know which GPUs the rank had."""
        is_known = self._config.device != "cuda" or (rank.info is not None and rank.nodes == nodes)
        return is_known and len(set(nodes)) == 1

    def _decide_device(self) -> None:
        """Resolve `device="auto"` in the ranks' configuration. Needs a connection to Ray."""
        if self._config.device == "auto":
            self._config = msgspec.structs.replace(self._config, device=choose_device(read_cluster()))

    def _keep_dtype(self) -> None:
        """Let ranks that are created later compute in the same dtype as those that are up, whatever their processor."""
        dtype = self.infos[0].dtype
        if self._config.model.dtype == "auto" and dtype in get_args(DType):  # a custom worker class may have others
            with self._lock:
                model = msgspec.structs.replace(self._config.model, dtype=cast(DType, dtype))
                self._config = msgspec.structs.replace(self._config, model=model)

    def _make_standbys(self) -> Standbys | NoStandbys:
        """What keeps the engine's standbys, without any processes: nothing if they are disabled or unsupported.

        Ranks in lockstep can only start all together. In the caller's placement groups, what a dead rank has reserved
        may be taken by others, unless its successor reserves it again.
        """
        if self._config.recovery.standby_delay_s is None or self.is_lockstep or self._given.groups is not None:
            return NoStandbys()
        # standbys outlast changes of the checkpoint, so all of them read the one that the engine has started with
        return Standbys(
            lambda node: self.runtime.create_standby(
                self._name("standby"), _reading(self._config, self._first_path), node
            ),
            self.runtime,
        )

    def _name(self, what: str) -> str:
        """A name for a new actor. A successor gets another name, because Ray may not have released the old name yet."""
        self._num_created += 1
        name = f"raycore_{self.engine_id}_{what}"
        return name if self._num_created <= self._shape.num_ranks else f"{name}_{self._num_created}"


def _reading(config: EngineConfig, path: str) -> EngineConfig:
    """The configuration with the weights of another checkpoint."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, model=path))
