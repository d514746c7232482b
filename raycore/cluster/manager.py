"""Brings an engine's ranks up, watches them, and takes them down.

Owns the ranks' actors, the placement groups that it made, and its use of Ray. Knows nothing of requests: what a lost
rank means to them is its caller's business.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.errors import InvalidPlacementGroup
from placement.plan import EngineShape
from placement.reserve import bundle_nodes, release, reserve, validate_group
from raycore.cluster.deaths import describe_death, describe_rank, root_cause
from raycore.cluster.local import acquire_ray, release_ray
from raycore.cluster.watch import OnRankFailure, RankWatch
from raycore.config import EngineConfig
from raycore.engine.actor import DPEngineCoreActor
from raycore.errors import InitializationError, InvalidConfig, InvalidInput
from raycore.messages import EngineInfo
from raycore.processes import wait_until_gone
from raycore.worker.quiet import Ringer

logger = logging.getLogger(__name__)

OnProgress = Callable[[float], object]

_PROGRESS_S = 0.25
"""How often whoever watches the start hears of its progress."""

_KILLED_TIMEOUT_S = 5.0
"""Killed processes are waited for this long: they are gone within milliseconds, unless the machine is stuck."""


def shape_of(config: EngineConfig) -> EngineShape:
    """What `config` needs of the cluster."""
    inline = config.executor.backend == "inline"
    return EngineShape(
        num_ranks=config.parallel.data_parallel_size,
        world_size=config.parallel.world_size,
        cpus_per_worker=1.0,
        gpus_per_worker=1.0 if config.device == "cuda" else 0.0,
        engine_cpus=0.0 if inline else 1.0,
        strategy=config.parallel.placement_strategy,
        tensor_parallel_size=config.parallel.tensor_parallel_size,
    )


class CoreEngineActorManager:
    """One `DPEngineCoreActor` for each data-parallel rank, each in a placement group of its own."""

    def __init__(
        self,
        config: EngineConfig,
        placement_groups: Sequence[PlacementGroup] | None = None,
        *,
        actor_cls: Any = DPEngineCoreActor,
        placement_timeout_s: float = 60.0,
    ) -> None:
        """Nothing is started yet.

        Args:
            placement_groups: the caller's own, one for each rank, used as they are and left in place. None: raycore
                makes its own and removes them.
            actor_cls: the Ray actor class of a rank.
            placement_timeout_s: how long to wait for resources that others hold.
        """
        self.engine_id = secrets.token_hex(4)
        self.actors: list[Any] = []
        """The ranks' handles, in rank order."""
        self.infos: list[EngineInfo] = []
        """What each rank said of itself once it was up, in rank order."""
        self._config = config
        self._shape = shape_of(config)
        self._actor_cls = actor_cls
        self._placement_timeout_s = placement_timeout_s
        self._brought_groups = list(placement_groups) if placement_groups is not None else None
        self._groups: list[PlacementGroup] = []
        self._group_nodes: list[list[str]] = []
        self._run_refs: list[ray.ObjectRef[Any]] = []
        self._watch: RankWatch | None = None
        self._uses_ray = False
        self._shutdown_lock = threading.Lock()

    def start(self, on_failure: OnRankFailure, on_progress: OnProgress | None = None) -> list[EngineInfo]:
        """Place, create and initialise all ranks, in parallel; start their loops, and the watch over them.

        Args:
            on_failure: told of every rank that ends without having been asked to, within milliseconds.
            on_progress: told a few times a second how much of the weights has been read, 0 to 1.

        Raises:
            InitializationError: a rank didn't come up, with that rank's own traceback; or Ray can't be used.
            InvalidInput: a rank found that the caller's input can't work.
            PlacementShortage: the cluster can't hold the shape.
            InvalidConfig: the caller's placement groups can't.
            Whichever it is, nothing stays behind.
        """
        with ExitStack() as undo:
            undo.callback(self.shutdown, timeout_s=0.0)
            acquire_ray(self._shape.num_cpus)
            self._uses_ray = True
            self._groups = self._validated_groups() if self._brought_groups is not None else self._reserve()
            self._group_nodes = [bundle_nodes(group) for group in self._groups]
            self.actors = [self._create(dp_rank) for dp_rank in range(self._shape.num_ranks)]
            self.infos = self._wait_for_init(on_progress)
            self._run_refs = [actor.run.remote() for actor in self.actors]
            self._watch = RankWatch(self._run_refs, self.infos, on_failure)
            undo.pop_all()
        return self.infos

    def shutdown(self, timeout_s: float | None = None) -> None:
        """Ask the ranks to stop, wait, then kill; give everything back. Idempotent, and works half-started.

        Args:
            timeout_s: how long the ranks may take to stop by themselves; None: as configured.
        """
        with self._shutdown_lock:
            if self._watch is not None:
                self._watch.expect_ends()
            if ray.is_initialized():
                self._stop_ranks(self._config.executor.shutdown_timeout_s if timeout_s is None else timeout_s)
                if self._brought_groups is None:
                    release(self._groups)
            if self._watch is not None:
                self._watch.join(_KILLED_TIMEOUT_S)
            self.actors, self._run_refs, self._groups, self._watch = [], [], [], None
            if self._uses_ray:
                self._uses_ray = False
                release_ray()

    # ---- starting

    def _reserve(self) -> list[PlacementGroup]:
        return reserve(self._shape, name=f"raycore_{self.engine_id}", timeout_s=self._placement_timeout_s)

    def _validated_groups(self) -> list[PlacementGroup]:
        groups = self._brought_groups or []
        if len(groups) != self._shape.num_ranks:
            raise InvalidConfig(
                f"{len(groups)} placement_groups for data_parallel_size={self._shape.num_ranks}: bring one a rank"
            )
        try:
            for group in groups:
                validate_group(group, self._shape, self._placement_timeout_s)
        except InvalidPlacementGroup as error:
            raise InvalidConfig(f"placement_groups: {error}") from error
        return groups

    def _create(self, dp_rank: int) -> Any:
        index = self._shape.engine_bundle_index
        bundle = self._shape.bundles[index]
        group = self._groups[dp_rank]
        return self._actor_cls.options(
            name=f"raycore_{self.engine_id}_dp{dp_rank}",
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0.0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        ).remote(self._config.encode(), dp_rank, group, self._num_local_workers(dp_rank), self.engine_id)

    def _num_local_workers(self, dp_rank: int) -> int:
        """Workers, of all ranks, on the node of this rank's first worker: they share its cores."""
        node = self._group_nodes[dp_rank][0]
        return sum(nodes[: self._shape.world_size].count(node) for nodes in self._group_nodes)

    def _wait_for_init(self, on_progress: OnProgress | None) -> list[EngineInfo]:
        ranks = {actor.wait_for_init.remote(): dp_rank for dp_rank, actor in enumerate(self.actors)}
        infos: dict[int, EngineInfo] = {}
        deadline_s = time.monotonic() + self._config.executor.init_timeout_s
        while ranks:
            timeout_s = max(0.0, deadline_s - time.monotonic())
            if on_progress is not None:
                timeout_s = min(timeout_s, _PROGRESS_S)
            done, _ = ray.wait(list(ranks), num_returns=1, timeout=timeout_s)
            if not done and on_progress is not None and time.monotonic() < deadline_s:
                self._report_progress(on_progress)
                continue
            if not done:
                raise InitializationError(
                    f"dp_ranks {sorted(ranks.values())} are not up after init_timeout_s="
                    f"{self._config.executor.init_timeout_s:g}: raise it if the checkpoint is just large"
                )
            for ref in done:
                dp_rank = ranks.pop(ref)
                infos[dp_rank] = _init_result(ref, dp_rank)
        return [infos[dp_rank] for dp_rank in sorted(infos)]

    def _report_progress(self, on_progress: OnProgress) -> None:
        # a rank whose process has yet to start answers later, and one that failed is found out by its init ref
        asked = [actor.load_progress.remote() for actor in self.actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=_PROGRESS_S)
        shares: list[float] = []
        for ref in answered:
            with suppress(RayError):
                shares.append(ray.get(ref))
        on_progress(sum(shares) / len(asked))

    # ---- stopping

    def _stop_ranks(self, timeout_s: float) -> None:
        if self._run_refs and timeout_s > 0:
            ringer = Ringer()
            for info, actor in zip(self.infos, self.actors, strict=True):
                ringer.ring(info.bell)
                actor.stop.remote()
            ray.wait(self._run_refs, num_returns=len(self._run_refs), timeout=timeout_s)
        for actor in self.actors:
            ray.kill(actor, no_restart=True)
        self._wait_for_processes()

    def _wait_for_processes(self) -> None:
        """Until the processes on this node are gone. Those on other nodes Ray ends; they can't be seen from here."""
        own_node = ray.get_runtime_context().get_node_id()
        local = [info for info in self.infos if set(self._group_nodes[info.dp_rank]) == {own_node}]
        pids = [pid for info in local for pid in {info.pid, *info.worker_pids}]
        running = wait_until_gone(pids, _KILLED_TIMEOUT_S)
        if running:
            logger.warning("processes %s still run %g s after they were killed", running, _KILLED_TIMEOUT_S)


def _init_result(ref: ray.ObjectRef[Any], dp_rank: int) -> EngineInfo:
    try:
        return msgspec.msgpack.decode(ray.get(ref), type=EngineInfo)
    except RayError as error:
        cause = root_cause(error)
        if isinstance(cause, (InvalidInput, InitializationError)):
            raise cause from error
        raise InitializationError(f"{describe_death(error)}\n{describe_rank(None, dp_rank)} didn't come up") from error
