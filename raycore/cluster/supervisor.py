"""Keeps ranks running: replaces a rank that has died or stalled, or whose node is being drained.

A *failure domain* is a rank, or all ranks that share experts, which can only be replaced together. Each failure domain
has its own thread, so that one slow restart doesn't delay others. The supervisor doesn't handle requests: its
`RankListener` moves the requests of a lost rank.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

from ray.exceptions import RayError

from placement.errors import PlacementShortage
from placement.topology import draining_nodes
from raycore.cluster.failure_reports import describe_rank
from raycore.cluster.logs import with_last_lines
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.process_watch import Ends
from raycore.cluster.rank import Rank
from raycore.cluster.regrouping import CannotMove
from raycore.cluster.watchdog import Watchdog
from raycore.config import EngineConfig, RecoveryConfig
from raycore.engine.rank_events import EngineLost, LossExplained, RankListener, RanksLost, RankUp
from raycore.errors import EngineDeadError, InvalidConfig, RaycoreError
from raycore.messages import EngineInfo

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.5
"""Interval, in seconds, at which a thread checks for stalls, drained nodes, and whether to end. The end of a rank wakes
the thread at once."""

_DRAIN_POLL_INTERVAL_S = 2.0
_GET_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class WatchView:
    """A rank as the supervisor sees it."""

    num_restarts: int
    """How often the rank was replaced."""
    has_given_up: bool
    """Whether the rank has failed for good and won't be replaced."""


class RestartBudget:
    """Limits how often a rank is restarted, and gives the delay before each restart."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._starts_s: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Count a restart, and return the seconds to wait before it. None if there were too many restarts already."""
        window_s = self._config.restart_window_s
        while self._starts_s and self._starts_s[0] < now_s - window_s:
            self._starts_s.popleft()
        if len(self._starts_s) >= self._config.max_rank_restarts:
            return None
        num_recent = sum(start_s > now_s - self._config.crash_loop_s for start_s in self._starts_s)
        self._starts_s.append(now_s)
        # no delay if the rank had served for a while before it died: only crash loops need a back-off
        first_s = self._config.restart_backoff_s
        return min(self._config.max_restart_backoff_s, first_s * 2 ** (num_recent - 1)) if num_recent else 0.0


class Supervisor:
    """Watches all ranks of an engine, and replaces or scales them."""

    def __init__(self, manager: CoreEngineActorManager, listener: RankListener, config: EngineConfig) -> None:
        self._manager = manager
        self._listener = listener
        self._config = config.recovery
        self._losses = itertools.count(1)
        self._monitors: dict[int, _RankMonitor] = {}
        """The monitor of each rank's failure domain, by dp_rank."""
        self._scaling = threading.Lock()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._cause: EngineDeadError | None = None

    def start(self) -> None:
        """Tell the listener which ranks are up, and start to watch them."""
        self._watch(list(self._manager.ranks.values()))

    def wait(self, timeout_s: float | None = None) -> EngineDeadError | None:
        """Wait until the engine has failed or was stopped, at most `timeout_s` seconds.

        Returns: why the engine failed; None if it hasn't failed.
        """
        self._ended.wait(timeout_s)
        return self._cause

    @property
    def has_ended(self) -> bool:
        """Whether the engine has failed, or was stopped."""
        return self._ended.is_set()

    def report(self, dp_rank: int, reason: str) -> None:
        """Have a misbehaving rank killed and replaced, with its failure domain, for the given reason."""
        monitor = self._monitors.get(dp_rank)
        if monitor is not None and not self._stopping.is_set():
            monitor.suspect(dp_rank, reason)

    def watches(self) -> dict[int, WatchView]:
        """The supervisor's view of each rank, by dp_rank."""
        return {
            dp_rank: WatchView(monitor.num_restarts, monitor.has_given_up)
            for dp_rank, monitor in list(self._monitors.items())
        }

    def scale(self, num_ranks: int, drain_timeout_s: float | None = None) -> list[EngineInfo]:
        """Change the number of ranks to `num_ranks`. On return, new ranks are up, and surplus ranks have stopped.

        The ranks with the highest numbers are stopped. They have `drain_timeout_s` seconds (None: the option
        `drain_timeout_s`) to finish their requests. Ranks that share experts pause while experts move between them. If
        that fails, or isn't possible, all of them are restarted. Their requests continue in any case.

        Raises:
            InvalidConfig: the engine can't have this number of ranks, or has too little memory for it.
            PlacementShortage: the cluster can't fit the new ranks. The engine keeps its ranks.
            InitializationError: a new rank failed to start. The engine keeps its number of ranks.
            EngineDeadError: the engine has failed, or was shut down.
        """
        if num_ranks < 1:
            raise InvalidConfig(f"data_parallel_size={num_ranks} isn't a positive integer")
        if drain_timeout_s is None:
            drain_timeout_s = self._config.drain_timeout_s
        drain_timeout_s = _drain_timeout_s(self._manager, drain_timeout_s)
        with self._scaling:
            if self.has_ended:
                raise self._cause or EngineDeadError("the engine was shut down")
            standing = sorted(self._monitors)
            if num_ranks != len(standing) and self._manager.shares_experts:
                self._scale_group(standing, num_ranks, drain_timeout_s)
            else:
                if num_ranks > len(standing):
                    self._grow([dp_rank for dp_rank in range(num_ranks) if dp_rank not in self._monitors])
                self._shrink([dp_rank for dp_rank in standing if dp_rank >= num_ranks], drain_timeout_s)
            return self._manager.infos

    def stop(self) -> None:
        """Stop watching the ranks, so that they aren't replaced when they are stopped. Idempotent."""
        self._stopping.set()
        self._ended.set()
        for monitor in self._all_monitors():
            monitor.leave()

    def join(self, timeout_s: float) -> None:
        """After `stop()`: wait up to `timeout_s` seconds for the threads to end."""
        deadline_s = time.monotonic() + timeout_s
        for monitor in self._all_monitors():
            monitor.join(max(0.0, deadline_s - time.monotonic()))

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
        self._manager.shrink(leaving, _GET_TIMEOUT_S)

    def _scale_group(self, standing: Sequence[int], num_ranks: int, drain_timeout_s: float) -> None:
        """Scale ranks that share experts: without a restart, if possible."""
        try:
            added = self._add_to_group(num_ranks)
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
        self._manager.shrink(leaving, _GET_TIMEOUT_S if failure is None else 0.0)
        ranks = list(self._manager.ranks.values())
        (monitor,) = self._watch(ranks, added if failure is None else [], num_restarts)
        if failure is not None:
            monitor.suspect(0, f"moving experts failed: {failure}")
            self._wait_for_restart(monitor)

    def _add_to_group(self, num_ranks: int) -> list[Rank]:
        """Start the ranks that are missing, and check that experts can be moved. If not, remove these ranks again."""
        if self._manager.activity.asleep:
            raise CannotMove("the engine is asleep, so its experts may not be in memory")
        before = set(self._manager.ranks)
        self._manager.check_memory(num_ranks)
        try:
            added = self._manager.grow_group(num_ranks)
            if added:
                self._manager.confirm(added)
                self._manager.check_memory(num_ranks)
        except BaseException:
            self._manager.shrink(sorted(set(self._manager.ranks) - before))
            raise
        return added

    def _regroup(self, num_ranks: int) -> Exception | None:
        """Move the experts. Returns why that failed, if it did: the ranks must be restarted then."""
        try:
            self._manager.regroup(num_ranks)
        except (RaycoreError, RayError) as error:
            if self._stopping.is_set():
                raise EngineDeadError("the engine was shut down") from error
            logger.warning("moving experts failed, so the ranks are restarted to become %d: %s", num_ranks, error)
            self._manager.resize(num_ranks)
            return error
        return None

    def _wait_for_restart(self, monitor: _RankMonitor) -> None:
        """Wait until the monitor has replaced its ranks, which takes as many attempts as it has."""
        while not monitor.has_replaced.wait(_POLL_INTERVAL_S):
            if self.has_ended:
                raise self._cause or EngineDeadError("the engine was shut down")

    def _share_anew(self, standing: Sequence[int], num_ranks: int, drain_timeout_s: float) -> None:
        places = self._manager.prepare(num_ranks)
        self._release_monitors(standing)
        self._listener.ranks_leaving(standing, drain_timeout_s)
        try:
            ranks = self._manager.restart(places, num_ranks)
            self._manager.confirm(ranks)
        except BaseException:
            logger.exception("can't restart with %d ranks; going back to %d", num_ranks, len(standing))
            ranks = self._manager.restart(self._manager.prepare(len(standing)), len(standing))
            self._manager.confirm(ranks)
            self._watch(ranks)
            raise
        self._watch(ranks)

    def _release_monitors(self, dp_ranks: Sequence[int]) -> None:
        monitors = {self._monitors[dp_rank] for dp_rank in dp_ranks}
        for monitor in monitors:
            monitor.leave()
        for monitor in monitors:
            monitor.join(None)
        for dp_rank in dp_ranks:
            del self._monitors[dp_rank]

    # ---- monitors and their reports

    def _all_monitors(self) -> set[_RankMonitor]:
        return set(self._monitors.values())

    def _watch(
        self, ranks: Sequence[Rank], new: Sequence[Rank] | None = None, num_restarts: int = 0
    ) -> list[_RankMonitor]:
        """Watch ranks.

        Args:
            new: those that the listener doesn't know yet. None: all of them.
            num_restarts: how often they were replaced.

        Returns: the monitors.
        """
        failure_domains = [list(ranks)] if self._manager.is_lockstep else [[rank] for rank in ranks]
        _announce(self._listener, ranks if new is None else new)
        monitors: list[_RankMonitor] = []
        for domain in failure_domains:
            monitor = _RankMonitor(
                domain, self._manager, self._listener, self._config, self._give_up, self._losses.__next__
            )
            monitor.num_restarts = num_restarts
            for rank in domain:
                self._monitors[rank.dp_rank] = monitor
            monitor.start()
            monitors.append(monitor)
        return monitors

    def _give_up(self, monitor: _RankMonitor, error: EngineDeadError) -> None:
        """Give up a failure domain. The engine fails once all its failure domains are given up."""
        with self._lock:
            monitor.has_given_up = True
            others = [other for other in self._all_monitors() if not other.has_given_up]
            if others or self._stopping.is_set():
                lost = [dp_rank for dp_rank, other in list(self._monitors.items()) if other is monitor]
                logger.error(
                    "dp_ranks %s failed and won't be restarted; %d other ranks continue: %s", lost, len(others), error
                )
                return
            self._cause = error
        self._listener.on_rank_event(EngineLost(error))
        self._ended.set()


class _RankMonitor:
    """The thread that watches one failure domain and replaces its ranks."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        manager: CoreEngineActorManager,
        listener: RankListener,
        config: RecoveryConfig,
        give_up: Callable[[_RankMonitor, EngineDeadError], None],
        next_loss: Callable[[], int],
    ) -> None:
        """`next_loss`: returns a new number, by which `RanksLost` and `LossExplained` name a loss."""
        self.has_given_up = False
        self.num_restarts = 0
        self.has_replaced = threading.Event()
        """Set once the ranks have been replaced."""
        self._ranks = list(ranks)
        self._dp_ranks = [rank.dp_rank for rank in ranks]
        self._manager = manager
        self._listener = listener
        self._config = config
        self._give_up = give_up
        self._next_loss = next_loss
        self._unexplained: int | None = None
        """The number of the latest loss, until the listener gets the explanation; otherwise None."""
        self._budget = RestartBudget(config)
        self._leaving = threading.Event()
        self._suspicion: tuple[int, str] | None = None
        self._next_drain_look_s = 0.0
        name = "raycore-monitor-dp" + "-".join(map(str, self._dp_ranks))
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Stop watching, because the ranks or the whole engine are about to be stopped."""
        self._leaving.set()

    def suspect(self, dp_rank: int, reason: str) -> None:
        """Have the failure domain killed and replaced, because of `reason`, which concerns `dp_rank`."""
        self._suspicion = dp_rank, reason

    def join(self, timeout_s: float | None) -> None:
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                ends = Ends(self._ranks, self._manager.node)
                try:
                    explain = self._wait_for_end(ends)
                    if self._leaving.is_set():
                        return
                    lost = self._drained if explain is None else self._tell(cache(explain))
                finally:
                    ends.close()
                if not self._replace(lost):
                    return
        except Exception as error:  # otherwise the thread would end, and no failure would be noticed
            if not self._leaving.is_set():
                logger.exception("the monitor of dp_ranks %s failed", self._dp_ranks)
                blind = EngineDeadError(
                    f"{error}\ndp_ranks {self._dp_ranks} can no longer be monitored, and count as failed"
                )
                self._explain_loss(self._unexplained or self._tell_of_loss(), blind)
                self._give_up(self, blind)

    def _drained(self) -> EngineDeadError:
        return EngineDeadError(f"a node that runs dp_ranks {self._dp_ranks} is being drained")

    def _tell(self, explain: Callable[[], EngineDeadError]) -> Callable[[], EngineDeadError]:
        """Report the loss of the ranks to the listener and the log. Returns a function that returns the explanation."""
        loss = self._tell_of_loss()
        explain()  # called before the manager kills the domain's other ranks, which Ray would report as the cause
        lost = cache(partial(_with_last_lines, explain))

        def tell_why() -> None:
            logger.error("%s", lost())
            self._explain_loss(loss, lost())

        # on a thread, because the replacement must not wait for log lines from another node
        threading.Thread(target=tell_why, name="raycore-last-lines", daemon=True).start()
        return lost

    def _tell_of_loss(self) -> int:
        loss = self._unexplained = self._next_loss()
        self._listener.on_rank_event(RanksLost(self._dp_ranks, loss))
        return loss

    def _explain_loss(self, loss: int, error: EngineDeadError) -> None:
        self._listener.on_rank_event(LossExplained(loss, error))
        if self._unexplained == loss:
            self._unexplained = None

    # ---- while they run

    def _wait_for_end(self, ends: Ends) -> Callable[[], EngineDeadError] | None:
        """Wait until a rank ends or stalls. Returns a function that returns the reason.

        Returns None if a node of the ranks is being drained, after the ranks' requests have finished or moved. Also
        returns None if the monitor must end.
        """
        watchdogs = {rank.dp_rank: Watchdog(rank.actor, self._config.step_timeout_s) for rank in self._ranks}
        while not self._leaving.is_set():
            lost = ends.wait(_POLL_INTERVAL_S)
            if lost is not None:
                return partial(ends.explain, lost)
            stalled = self._suspicion or self._ask(watchdogs)
            if stalled is not None:
                dp_rank, reason = stalled
                # don't wait until Ray notices that they are dead, which may take long
                for rank in self._ranks:
                    self._manager.kill(rank.dp_rank)
                info = self._ranks[self._dp_ranks.index(dp_rank)].info
                text = f"{describe_rank(info, dp_rank)} was killed: {reason}"
                pid, node = (None, None) if info is None else (info.pid, info.node_id)
                killed = EngineDeadError(text, pid=pid, node=node)
                return lambda: killed
            if self._is_node_going():
                self._listener.ranks_leaving(
                    self._dp_ranks, _drain_timeout_s(self._manager, self._config.drain_timeout_s)
                )
                return None
        return None

    def _ask(self, watchdogs: dict[int, Watchdog]) -> tuple[int, str] | None:
        """(dp_rank, reason) of a stalled rank; None if no rank has stalled."""
        # ranks in lockstep run every step together: if one of them has work, all of them must make progress
        is_busy = self._manager.is_changing or any(self._listener.is_busy(dp_rank) for dp_rank in watchdogs)
        for dp_rank, watchdog in watchdogs.items():
            reason = watchdog.look(is_busy)
            if reason is not None:
                return dp_rank, reason
        return None

    def _is_node_going(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_drain_look_s:
            return False
        self._next_drain_look_s = now_s + _DRAIN_POLL_INTERVAL_S
        going = draining_nodes()
        return any(not going.isdisjoint(rank.nodes) for rank in self._ranks)

    # ---- when they have ended

    def _replace(self, lost: Callable[[], EngineDeadError]) -> bool:
        """Replace the ranks, in several attempts if necessary.

        Returns False if the ranks were given up, or if the monitor must end.
        """
        failed: EngineDeadError | None = None
        started_s = time.monotonic()
        while not self._leaving.is_set():
            delay_s = self._budget.next_delay_s(time.monotonic())
            if delay_s is None:
                for dp_rank in self._dp_ranks:
                    self._manager.kill(dp_rank)
                used = f"max_rank_restarts={self._config.max_rank_restarts}"
                window = f"restart_window_s={self._config.restart_window_s:g}"
                text = f"{failed or lost()}\ndp_ranks {self._dp_ranks} have used up {used} within {window}"
                self._give_up(self, EngineDeadError(text))
                return False
            if self._leaving.wait(delay_s):
                return False
            try:
                self._ranks = self._manager.replace(self._dp_ranks, lambda: not self._leaving.is_set())
                self._manager.confirm(self._ranks)
            except (RaycoreError, PlacementShortage, RayError) as error:
                if not self._leaving.is_set():
                    logger.error("an attempt to restart dp_ranks %s failed: %s", self._dp_ranks, error)
                failed = EngineDeadError(f"{error}\ndp_ranks {self._dp_ranks} were being restarted after: {lost()}")
                continue
            self._suspicion = None  # concerned the previous ranks
            self.num_restarts += 1
            _announce(self._listener, self._ranks)
            self.has_replaced.set()
            took_s = time.monotonic() - started_s
            logger.warning("dp_ranks %s were replaced and are serving again, after %.1f s", self._dp_ranks, took_s)
            return True
        return False


def _drain_timeout_s(manager: CoreEngineActorManager, timeout_s: float) -> float:
    """How long ranks that leave may take to finish their requests. While they are paused, they can't finish any."""
    return 0.0 if manager.activity.is_paused else timeout_s


def _with_last_lines(explain: Callable[[], EngineDeadError]) -> EngineDeadError:
    dead = explain()
    told = EngineDeadError(with_last_lines(str(dead), dead.pid, dead.node), pid=dead.pid, node=dead.node)
    told.__cause__ = dead.__cause__
    return told


def _announce(listener: RankListener, ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        assert rank.info is not None, "confirm() comes first"
        listener.on_rank_event(RankUp(rank.dp_rank, rank.actor, rank.info))
