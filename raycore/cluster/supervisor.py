"""Keeps ranks running: replaces a rank that has died or stalled, or whose node is being drained.

A *failure domain* is a rank, or all ranks that share experts, which can only be replaced together. Each failure domain
has its own thread, so that one slow restart doesn't delay others. The supervisor doesn't handle requests: its
`RankListener` moves the requests of a lost rank.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError

from raycore.cluster.cluster_watch import ClusterWatch
from raycore.cluster.failure_reports import describe_death, owner_death
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.monitor import POLL_INTERVAL_S, RankMonitor
from raycore.cluster.rank import Rank
from raycore.config import EngineConfig
from raycore.config.parallel import MAX_RANKS
from raycore.engine.rank_events import EngineLost, RankListener
from raycore.errors import EngineDeadError, InvalidConfig, RaycoreError
from raycore.messages import EngineInfo
from raycore.parts.experts.cluster import CannotMove, GroupScaling
from raycore.system import threading

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0
"""How long ranks that leave may take to stop before they are killed."""


@dataclass(frozen=True)
class WatchView:
    """A rank as the supervisor sees it."""

    num_restarts: int
    """How often the rank was replaced."""
    has_given_up: bool
    """Whether the rank has failed for good and won't be replaced."""
    shortage: str = ""
    """While no node has room for the rank: what is missing. Empty otherwise."""


class Supervisor:
    """Watches all ranks of an engine, and replaces or scales them."""

    def __init__(self, manager: CoreEngineActorManager, listener: RankListener, config: EngineConfig) -> None:
        self._manager = manager
        self._clock = manager.runtime.clock
        self._listener = listener
        self._config = config.recovery
        self._losses = itertools.count(1)
        self._monitors: dict[int, RankMonitor] = {}
        """The monitor of each rank's failure domain, by dp_rank."""
        self._scaling = threading.Lock()
        self._lock = threading.Lock()
        self._is_stopping = False
        self._ended = threading.Event()
        self._cause: EngineDeadError | None = None
        self._cluster = ClusterWatch(manager.runtime, self._fail)
        self._group = GroupScaling(manager, config)

    def start(self) -> None:
        """Tell the listener which ranks are up, and start to watch them."""
        self._cluster.start()
        self._watch(list(self._manager.ranks.values()))
        self._manager.servers.on_over(self.begin_anew)

    def wait(self, timeout_s: float | None = None) -> EngineDeadError | None:
        """Wait until the engine has failed or was stopped, at most `timeout_s` seconds.

        Returns: why the engine failed; None if it hasn't failed.
        """
        self._clock.wait(self._ended, timeout_s)
        return self._cause

    @property
    def has_ended(self) -> bool:
        """Whether the engine has failed, or was stopped."""
        return self._ended.is_set()

    def report(self, dp_rank: int, reason: str) -> None:
        """Have a misbehaving rank killed and replaced, with its failure domain, for the given reason."""
        monitor = self._monitors.get(dp_rank)
        if monitor is not None and not self._is_stopping:
            monitor.suspect(dp_rank, reason)

    def begin_anew(self, why: str) -> None:
        """Have all ranks that share experts replaced, though none of this engine has failed."""
        monitor = self._monitors.get(0)
        if monitor is not None and not self._is_stopping:
            monitor.suspect(0, why, is_free=True)

    def watches(self) -> dict[int, WatchView]:
        """The supervisor's view of each rank, by dp_rank."""
        return {
            dp_rank: WatchView(monitor.num_restarts, monitor.has_given_up, monitor.shortage)
            for dp_rank, monitor in list(self._monitors.items())
        }

    def scale(self, num_ranks: int, drain_timeout_s: float | None = None) -> list[EngineInfo]:
        """Change the number of ranks to `num_ranks`. On return, new ranks are up, and surplus ranks have stopped.

        The ranks with the highest numbers are stopped. They have `drain_timeout_s` seconds (None: the option
        `drain_timeout_s`) to finish their requests. Ranks that share experts pause while experts move between them. If
        that fails, or isn't possible, all of them are restarted. Their requests continue in any case.

        Raises:
            InvalidConfig: the engine can't have this number of ranks, with its options or at all, or has too little
                memory for it. The engine keeps its ranks.
            InvalidCheckpoint: saved shares of experts are damaged. The engine keeps its ranks.
            PlacementShortage: the cluster can't fit the new ranks. The engine keeps its ranks.
            InitializationError: a new rank failed to start. The engine keeps its number of ranks.
            EngineDeadError: the engine has failed, or was shut down.
        """
        asked: Any = num_ranks  # users may pass anything
        if not isinstance(asked, int) or not 1 <= asked <= MAX_RANKS:
            raise InvalidConfig(f"data_parallel_size={asked!r} isn't an integer from 1 to {MAX_RANKS}")
        drain_timeout_s = self._manager.drain_timeout_s(drain_timeout_s)
        with self._scaling:
            if self.has_ended:
                raise self._cause or EngineDeadError("the engine was shut down")
            standing = sorted(self._monitors)
            if num_ranks != len(standing):
                self._manager.check_num_ranks(num_ranks)
            if num_ranks != len(standing) and self._manager.shares_experts:
                self._scale_group(standing, num_ranks, drain_timeout_s)
            else:
                if num_ranks > len(standing):
                    self._grow([dp_rank for dp_rank in range(num_ranks) if dp_rank not in self._monitors])
                self._shrink([dp_rank for dp_rank in standing if dp_rank >= num_ranks], drain_timeout_s)
            return self._manager.infos

    def stop(self) -> None:
        """Stop watching the ranks, so that they aren't replaced when they are stopped. Idempotent."""
        self._is_stopping = True
        self._ended.set()
        self._cluster.stop()
        for monitor in self._all_monitors():
            monitor.leave()

    def join(self, timeout_s: float) -> None:
        """After `stop()`: wait up to `timeout_s` seconds for the threads to end."""
        deadline_s = self._clock.now_s() + timeout_s
        for monitor in self._all_monitors():
            monitor.join(max(0.0, deadline_s - self._clock.now_s()))
        self._cluster.join(max(0.0, deadline_s - self._clock.now_s()))

    def _serving(self) -> list[int]:
        """The ranks that serve, as far as their monitors know."""
        watched = list(self._monitors.items())
        return [dp_rank for dp_rank, monitor in watched if monitor.is_serving and not monitor.has_given_up]

    # ---- scaling

    def _grow(self, added: Sequence[int]) -> None:
        ranks = self._manager.grow(added)
        try:
            self._manager.confirm(ranks)
        except BaseException:
            self._manager.shrink(added)
            raise
        self._watch(ranks)

    def _shrink(self, leaving: Sequence[int], drain_timeout_s: float) -> None:
        if not leaving:
            return
        self._release_monitors(leaving)
        self._listener.ranks_leaving(leaving, drain_timeout_s)
        self._manager.shrink(leaving, _STOP_TIMEOUT_S)

    def _scale_group(self, standing: Sequence[int], num_ranks: int, drain_timeout_s: float) -> None:
        """Scale ranks that share experts: without a restart, if possible."""
        try:
            added = self._group.add(num_ranks)
        except CannotMove as reason:
            logger.warning("all ranks are restarted to become %d: %s", num_ranks, reason)
            self._share_anew(standing, num_ranks, drain_timeout_s)
            return
        leaving = [dp_rank for dp_rank in standing if dp_rank >= num_ranks]
        if leaving:
            self._listener.ranks_leaving(leaving, drain_timeout_s)
        num_restarts = self._monitors[standing[0]].num_restarts
        self._release_monitors(standing)
        if leaving:  # they may have failed meanwhile, and have come back
            self._listener.ranks_leaving(leaving, 0.0)
        failure = self._regroup(num_ranks)
        self._manager.shrink(leaving, _STOP_TIMEOUT_S if failure is None else 0.0)
        ranks = list(self._manager.ranks.values())
        (monitor,) = self._watch(ranks, added if failure is None else [], num_restarts)
        if failure is not None:
            monitor.suspect(0, f"moving experts failed: {failure}")
            self._wait_for_restart(monitor)

    def _regroup(self, num_ranks: int) -> str | None:
        """Move the experts. Returns why that failed, if it did: the ranks must be restarted then."""
        try:
            self._group.move(num_ranks)
        except (RaycoreError, RayError) as error:
            if self._is_stopping:
                raise EngineDeadError("the engine was shut down") from error
            why = describe_death(error)
            logger.warning("moving experts failed, so the ranks are restarted to become %d: %s", num_ranks, why)
            self._manager.resize(num_ranks)
            return why
        return None

    def _wait_for_restart(self, monitor: RankMonitor) -> None:
        """Wait until the monitor has replaced its ranks, which takes as many attempts as it has."""
        while not self._clock.wait(monitor.has_replaced, POLL_INTERVAL_S):
            if self.has_ended:
                raise self._cause or EngineDeadError("the engine was shut down")

    def _share_anew(self, standing: Sequence[int], num_ranks: int, drain_timeout_s: float) -> None:
        placement = self._manager.prepare(num_ranks)
        self._release_monitors(standing)
        self._listener.ranks_leaving(standing, drain_timeout_s, come_back=True)
        if num_ranks < len(standing):
            self._listener.ranks_leaving(standing[num_ranks:], 0.0)
        try:
            ranks = self._manager.restart(placement, num_ranks)
            self._manager.confirm(ranks)
        except BaseException:
            logger.exception("can't restart with %d ranks; going back to %d", num_ranks, len(standing))
            ranks = self._manager.restart(self._manager.prepare(len(standing)), len(standing))
            self._manager.confirm(ranks)
            self._watch(ranks)
            raise
        self._watch(ranks)

    def _release_monitors(self, dp_ranks: Sequence[int]) -> None:
        monitors = dict.fromkeys(self._monitors[dp_rank] for dp_rank in dp_ranks)
        for monitor in monitors:
            monitor.leave()
        for monitor in monitors:
            monitor.join(None)
        for dp_rank in dp_ranks:
            del self._monitors[dp_rank]

    # ---- monitors and their reports

    def _all_monitors(self) -> list[RankMonitor]:
        return list(dict.fromkeys(self._monitors.values()))

    def _watch(
        self, ranks: Sequence[Rank], new: Sequence[Rank] | None = None, num_restarts: int = 0
    ) -> list[RankMonitor]:
        """Watch ranks.

        Args:
            new: those that the listener doesn't know yet. None: all of them.
            num_restarts: how often they were replaced.

        Returns: the monitors.
        """
        failure_domains = [list(ranks)] if self._manager.is_lockstep else [[rank] for rank in ranks]
        self._manager.weights.announce(self._listener, ranks if new is None else new)
        monitors: list[RankMonitor] = []
        for domain in failure_domains:
            monitor = RankMonitor(
                *(domain, self._manager, self._listener, self._config, self._give_up, self._losses.__next__),
                draining=lambda: self._cluster.draining,
                serving=self._serving,
            )
            monitor.num_restarts = num_restarts
            for rank in domain:
                self._monitors[rank.dp_rank] = monitor
            monitor.start()
            monitors.append(monitor)
        if self._is_stopping or self._cause is not None:  # only those that were there before were told to leave
            for monitor in monitors:
                monitor.leave()
        return monitors

    def _give_up(self, monitor: RankMonitor, error: EngineDeadError) -> None:
        """Give up a failure domain. The engine fails once all its failure domains are given up, or have lost their
        owner.
        """
        with self._lock:
            monitor.has_given_up = True
            others = [other for other in self._all_monitors() if not other.has_given_up]
        if (others and owner_death(error.__cause__) is None) or self._is_stopping:
            lost = [dp_rank for dp_rank, other in list(self._monitors.items()) if other is monitor]
            logger.error(
                "dp_ranks %s failed and won't be restarted; %d other ranks continue: %s", lost, len(others), error
            )
            return
        self._fail(error)

    def _fail(self, error: EngineDeadError) -> None:
        """End the engine for good, because of `error`. Nothing of it stays reserved."""
        with self._lock:
            if self._cause is not None:
                return
            self._cause = error
        for monitor in self._all_monitors():
            monitor.has_given_up = True
            monitor.leave()
        self._listener.on_rank_event(EngineLost(error))
        self._ended.set()
        self._cluster.stop()
        self._manager.give_back()
