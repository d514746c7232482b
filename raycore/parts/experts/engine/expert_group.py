"""A rank's membership in a group of ranks that share experts. The group can change while requests run."""

from __future__ import annotations

from raycore.config import EngineConfig
from raycore.engine.rank_memory import RankMemory
from raycore.engine.scheduling import num_turns
from raycore.executor.base import Executor
from raycore.scheduler.protocol import SchedulerProtocol
from raycore.worker.rank import Regrouping


class ExpertGroup:
    """The group that one rank belongs to. A rank that shares no experts never changes its group."""

    def __init__(self, executor: Executor, scheduler: SchedulerProtocol, memory: RankMemory, *, is_new: bool) -> None:
        """`is_new`: whether the rank has yet to join its first group, from which its workers get their weights."""
        self._executor = executor
        self._scheduler = scheduler
        self._memory = memory
        self._is_new = is_new
        self.is_paused = is_new
        """Whether no steps are planned, because the group is about to change."""
        self.generation = 0
        """The number of the present group, among all that there have been."""

    def pause(self) -> None:
        """Plan no more steps until `change()`. Requests stay."""
        self.is_paused = True

    def change(self, regrouping: Regrouping, config: EngineConfig, *, stays: bool) -> None:
        """Join another group, with the same requests, and go on. No step may be in flight.

        All ranks that stay, come or leave must do this at the same time, while they are paused.

        Args:
            config: the configuration with the number of ranks of the new group.
            stays: whether this rank belongs to the new group. One that doesn't stays paused.

        Raises: what a worker raised. The rank can't continue afterwards.
        """
        assert self.is_paused, "pause() comes first"
        self._executor.regroup(regrouping, config)
        self.generation = regrouping.generation
        if not stays:
            return
        if self._is_new:
            self._memory.allocate_cache()
        elif regrouping.num_ranks > regrouping.num_ranks_before:
            self._executor.collective_rpc("accompany_warm_up")
        self._scheduler.take_turns(num_turns(config))
        self._is_new = self.is_paused = False
