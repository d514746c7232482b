"""Changes the number of ranks that share experts, without a restart: the driver's part.

Additional ranks start beside the others. Then all ranks pause, which ends their wave, and then join the new group
together. Their workers move the experts. A rank that fails meanwhile takes the others along, because they wait for it,
so its end or its silence is noticed at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

import msgspec
from ray.exceptions import RayError, RayTaskError

from raycore.cluster.failure_reports import describe_death
from raycore.cluster.rank import workers_by_node
from raycore.cluster.watchdog import Watchdog
from raycore.errors import EngineDeadError, InvalidConfig, RaycoreError, WorkerFailed
from raycore.ray_api import cause_of
from raycore.worker.rank import MemoryNeed, Regrouping

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.cluster.manager import CoreEngineActorManager
    from raycore.cluster.rank import Rank
    from raycore.cluster.runtime import Runtime
    from raycore.config import EngineConfig

T = TypeVar("T")

_POLL_INTERVAL_S = 0.1


class CannotMove(RaycoreError):
    """These ranks can't move experts. The message says why. Nothing has changed."""


class GroupScaling:
    """Changes the number of an engine's ranks that share experts: first `add()`, then `move()`."""

    def __init__(self, manager: CoreEngineActorManager, config: EngineConfig) -> None:
        self._manager = manager
        self._desired = manager.desired
        self._world_size = config.parallel.world_size
        self._step_timeout_s = config.recovery.step_timeout_s
        self._timeout_s = config.executor.init_timeout_s

    def add(self, num_ranks: int) -> list[Rank]:
        """Start the ranks that `num_ranks` ranks have in addition, and check that experts can be moved.

        Raises, with those ranks removed again:
            InvalidConfig: weights are being updated, or a worker has too little memory. The message has the numbers.
            CannotMove: the ranks must be restarted instead.
            PlacementShortage, InitializationError: as in the manager's `grow()` and `confirm()`.
        """
        if self._desired.now.is_updating:
            raise InvalidConfig("scale(): weights are being updated: call finish_weight_update() first")
        self._check_awake()
        before = set(self._manager.ranks)
        self._check_memory(num_ranks)
        try:
            added = self._start(num_ranks)
            if added:
                self._manager.confirm(added)
                self._check_memory(num_ranks)
        except BaseException:
            self._manager.shrink(sorted(set(self._manager.ranks) - before))
            raise
        return added

    def move(self, num_ranks: int) -> None:
        """Have the ranks stop between two steps, move experts to the first `num_ranks` ranks, and go on.

        Additional ranks must be up. Ranks that leave must have no requests, and can be stopped afterwards.

        Raises: CannotMove if the engine is asleep or its weights are being updated, with nothing changed. Otherwise the
            ranks can't go on:
            WorkerFailed, EngineDeadError: a rank has failed, has ended or doesn't answer.
        """
        with self._desired.together(), closing(self._change()) as change:
            self._check_awake()
            if self._desired.now.is_updating:  # an update may have begun since ranks were added
                raise CannotMove("weights are being updated, so experts may have those of two versions")
            change.pause()
            generation = self._desired.now.generation + 1
            self._desired.change(generation=generation)
            change.move(num_ranks, generation)
            self._manager.join_group(num_ranks)

    def _check_awake(self) -> None:
        if self._desired.now.activity.asleep:
            raise CannotMove("the engine is asleep, so its experts may not be in memory")

    def _start(self, num_ranks: int) -> list[Rank]:
        ranks, infos = self._manager.ranks, self._manager.infos
        if len(infos) < len(ranks):
            raise CannotMove("some of the ranks are being replaced")
        added = [dp_rank for dp_rank in range(num_ranks) if dp_rank not in ranks]
        return self._manager.grow(added, min(info.num_blocks for info in infos))

    def _check_memory(self, num_ranks: int) -> None:
        """Check that workers have enough memory for the experts of `num_ranks` ranks. Asks those of them that are up.

        Raises:
            InvalidConfig: a worker has too little memory. The message has the numbers.
            CannotMove: the ranks must be restarted instead.
        """
        ranks, size = self._manager.ranks, self._world_size
        if any(rank.run_ref is None for rank in ranks.values()):
            raise CannotMove("some of the ranks are being replaced")
        nodes = {dp_rank: rank.nodes for dp_rank, rank in ranks.items() if dp_rank < num_ranks}
        counts = workers_by_node(nodes.values(), size)
        num_workers = {dp_rank: [counts[node] for node in own[:size]] for dp_rank, own in nodes.items()}
        with closing(self._change()) as change:
            change.check_memory(num_ranks, num_workers)

    def _change(self) -> GroupChange:
        ranks = [rank for _, rank in sorted(self._manager.ranks.items())]
        before = [rank for rank in ranks if not rank.awaits_group]
        added = [rank for rank in ranks if rank.awaits_group]
        own_node, runtime = self._manager.node, self._manager.runtime
        return GroupChange(before, added, own_node, self._step_timeout_s, self._timeout_s, runtime)


class GroupChange:
    """One change of the number of ranks that share experts. `close()` must be called afterwards."""

    def __init__(
        self,
        before: Sequence[Rank],
        added: Sequence[Rank],
        own_node: str,
        step_timeout_s: float,
        timeout_s: float,
        runtime: Runtime,
    ) -> None:
        """
        Args:
            before: the ranks of the present group, those that leave included.
            added: ranks that are up, and paused, because they belong to no group yet.
            own_node: the id of the node on which this process runs.
            step_timeout_s: how long a rank may take to answer.
            timeout_s: how long the ranks may take for each part of the change.
        """
        self._before = before
        self._all = [*before, *added]
        self._timeout_s = timeout_s
        self._runtime = runtime
        self._ends = runtime.watch(self._all, own_node)
        self._watchdogs = [(rank, Watchdog(rank.actor, step_timeout_s, runtime)) for rank in self._all]

    def close(self) -> None:
        """Stop watching the ranks."""
        self._ends.close()

    def check_memory(self, num_ranks: int, num_local_workers: Mapping[int, list[int]]) -> None:
        """Check that the workers of `num_ranks` ranks have enough memory for more experts.

        `num_local_workers`: by dp_rank, for each worker of the rank, the number of workers of all ranks on its node.

        Raises:
            InvalidConfig: a worker has too little memory. The message has the numbers.
            CannotMove: the workers can't tell, or a rank has failed.
        """
        asked = {
            rank.actor.utility.remote(
                "memory_need", (num_ranks, num_local_workers[rank.dp_rank]), {}, self._timeout_s
            ): rank
            for rank in self._all[:num_ranks]
        }
        try:
            needs = self._results(asked)
        except WorkerFailed as error:
            raise CannotMove(f"the workers can't move experts: {error.error}") from error
        except (EngineDeadError, RayError) as error:
            raise CannotMove(f"a rank has failed: {describe_death(error)}") from error
        for dp_rank, of_workers in sorted(needs.items()):
            _check_needs(num_ranks, dp_rank, of_workers)

    def pause(self) -> None:
        """Have the ranks of the present group stop between two steps.

        Raises: what a rank has raised, or an EngineDeadError if one has ended or doesn't answer.
        """
        self._results({rank.actor.pause_for_regrouping.remote(self._timeout_s): rank for rank in self._before})

    def move(self, num_ranks: int, generation: int) -> None:
        """Form the new group, of the first `num_ranks` ranks. They then go on. Raises what `pause()` raises."""
        first = self._all[0]
        (rendezvous,) = self._results({first.actor.next_rendezvous.remote(): first}).values()
        regrouping = Regrouping(len(self._before), num_ranks, rendezvous, generation)
        members = self._all[:num_ranks]
        addresses = self._results(
            {
                rank.actor.regroup.remote(
                    regrouping, [other.actor for other in members if other is not rank], self._timeout_s
                ): rank
                for rank in self._all
            }
        )
        for rank in members:
            if rank.info is not None and rank.awaits_group:
                rank.info = msgspec.structs.replace(rank.info, kv_addresses=addresses[rank.dp_rank])

    def _results(self, asked: Mapping[ObjectRef[T], Rank]) -> dict[int, T]:
        """Wait for calls of ranks. Returns the results by dp_rank. Raises what `pause()` raises."""
        results: dict[int, T] = {}
        waiting = list(asked)
        deadline_s = self._runtime.clock.now_s() + self._timeout_s
        while waiting:
            done, waiting = self._runtime.wait(waiting, num_returns=len(waiting), timeout_s=_POLL_INTERVAL_S)
            for ref in done:
                results[asked[ref].dp_rank] = self._result(ref)
            if waiting:
                self._check_ranks()
            if waiting and self._runtime.clock.now_s() > deadline_s:
                late = sorted(asked[ref].dp_rank for ref in waiting)
                raise EngineDeadError(f"dp_ranks {late} didn't follow a change within {self._timeout_s:g} s")
        return results

    def _result(self, ref: ObjectRef[T]) -> T:
        try:
            return self._runtime.get(ref)
        except RayTaskError as error:
            cause = cause_of(error)
            raise cause if isinstance(cause, RaycoreError) else error from None

    def _check_ranks(self) -> None:
        lost = self._ends.wait(0.0)
        if lost is not None:
            raise self._ends.explain(lost)
        for rank, watchdog in self._watchdogs:
            reason = watchdog.look(is_busy=True)
            if reason is not None:
                raise EngineDeadError(f"dp_rank {rank.dp_rank}: {reason}")


def _check_needs(num_ranks: int, dp_rank: int, needs: Sequence[MemoryNeed]) -> None:
    for worker, (needed, available) in enumerate(needs):
        if needed > available:
            raise InvalidConfig(
                f"data_parallel_size={num_ranks}: worker {worker} of dp_rank {dp_rank} would need "
                f"{needed / 2**20:.1f} MiB more for its experts, and {available / 2**20:.1f} MiB are available: "
                "keep more ranks, or free memory on its node"
            )
