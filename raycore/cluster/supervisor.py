"""Keeps ranks running: notices that one has ended, stalled, or is to lose its node, and puts another in its place.

One thread waits for each rank, so that one that is slow to come back delays no other. Knows nothing of requests: what
becomes of those on a lost rank is the listener's business.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from placement.errors import PlacementShortage
from placement.topology import read_cluster
from raycore.cluster.deaths import describe_loss, describe_rank
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.rank import Rank
from raycore.config import RecoveryConfig
from raycore.errors import EngineDeadError, InvalidConfig, RaycoreError
from raycore.messages import EngineInfo

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
"""How often a thread looks at what no ref tells: stalls, drain notices, whether to end. A ref wakes it at once."""

_DRAIN_LOOK_S = 1.0
_GET_TIMEOUT_S = 5.0


class RankListener(Protocol):
    """Whoever hands work to ranks. Called from the supervisor's threads; must not block for long."""

    def rank_up(self, dp_rank: int, actor: Any, info: EngineInfo) -> None:
        """The rank serves."""
        ...

    def rank_lost(self, dp_rank: int, error: EngineDeadError) -> None:
        """The rank is gone, with what it had."""
        ...

    def rank_leaving(self, dp_rank: int, timeout_s: float) -> None:
        """The rank is about to be stopped: give it nothing more. Returns once nothing of it is needed any longer.

        What it doesn't finish within `timeout_s` is handed to others.
        """
        ...

    def is_busy(self, dp_rank: int) -> bool:
        """Whether the rank has work that its caller waits for."""
        ...

    def engine_lost(self, error: EngineDeadError) -> None:
        """No rank is left, and none will come."""
        ...


class RestartBudget:
    """How often a rank may be started again, and how long to wait before each time."""

    def __init__(self, config: RecoveryConfig) -> None:
        self._config = config
        self._starts_s: deque[float] = deque()

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds to wait before the next start, which is thereby counted; None when there were too many."""
        window_s = self._config.restart_window_s
        while self._starts_s and self._starts_s[0] < now_s - window_s:
            self._starts_s.popleft()
        num_recent = len(self._starts_s)
        if num_recent >= self._config.max_rank_restarts:
            return None
        self._starts_s.append(now_s)
        # the first death is taken for an accident
        first_s = self._config.restart_backoff_s
        return min(self._config.max_restart_backoff_s, first_s * 2 ** (num_recent - 1)) if num_recent else 0.0


class Watchdog:
    """Whether a busy rank still gets anywhere. Asks only while there is work, so that an idle rank is left alone."""

    def __init__(self, actor: Any, step_timeout_s: float) -> None:
        self._actor = actor
        self._timeout_s = step_timeout_s
        self._asked: ray.ObjectRef[Any] | None = None
        self._asked_s = 0.0

    def look(self, is_busy: bool) -> str | None:
        """What is wrong, or None. Never blocks."""
        now_s = time.monotonic()
        if self._asked is None:
            if is_busy:
                self._asked, self._asked_s = self._actor.step_age_s.remote(), now_s
            return None
        done, _ = ray.wait([self._asked], timeout=0)
        if not done:
            late_s = now_s - self._asked_s
            return f"it hasn't answered for {late_s:.1f} s" if late_s > self._timeout_s else None
        answered, self._asked = self._asked, None
        try:
            age_s: float = ray.get(answered)
        except RayError:
            return None  # it has died: the run ref says why
        return f"its present step has taken {age_s:.1f} s" if age_s > self._timeout_s else None


class Supervisor:
    """Watches over all ranks of an engine."""

    def __init__(self, manager: CoreEngineActorManager, listener: RankListener, config: RecoveryConfig) -> None:
        self._manager = manager
        self._listener = listener
        self._config = config
        self._keepers: dict[int, _Keeper] = {}
        self._scaling = threading.Lock()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._cause: EngineDeadError | None = None

    def start(self) -> None:
        """Tell the listener of the ranks that are up, and watch over them from now on."""
        self._keep(list(self._manager.ranks.values()))

    def wait(self, timeout_s: float | None = None) -> EngineDeadError | None:
        """Wait until the engine has ended, at most `timeout_s`. Returns why it failed; None if it hasn't."""
        self._ended.wait(timeout_s)
        return self._cause

    @property
    def has_ended(self) -> bool:
        """Whether the engine has failed, or was stopped."""
        return self._ended.is_set()

    def report(self, dp_rank: int, reason: str) -> None:
        """A rank doesn't do what it should, as seen by someone else: end it, so that it is replaced."""
        keeper = self._keepers.get(dp_rank)
        if keeper is not None and not self._stopping.is_set():
            keeper.suspect(reason)

    def scale(self, num_ranks: int, drain_timeout_s: float) -> list[EngineInfo]:
        """Have `num_ranks` ranks. New ones are up when this returns; those that leave, the highest, have left.

        Raises:
            InvalidConfig: not a possible number.
            PlacementShortage, InitializationError: growth that can't be had; nothing has changed.
        """
        if num_ranks < 1:
            raise InvalidConfig(f"data_parallel_size={num_ranks} is not positive")
        with self._scaling:
            standing = sorted(self._keepers)
            added = [dp_rank for dp_rank in range(num_ranks) if dp_rank not in self._keepers]
            if added:
                self._grow(added)
            self._shrink([dp_rank for dp_rank in standing if dp_rank >= num_ranks], drain_timeout_s)
            return [rank.info for _, rank in sorted(self._manager.ranks.items()) if rank.info is not None]

    def stop(self) -> None:
        """Watch no longer: from now on ranks end because they were asked to. Idempotent."""
        self._stopping.set()
        self._ended.set()
        for keeper in list(self._keepers.values()):
            keeper.leave()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads, after `stop()`."""
        deadline_s = time.monotonic() + timeout_s
        for keeper in list(self._keepers.values()):
            keeper.join(max(0.0, deadline_s - time.monotonic()))

    # ---- scaling

    def _grow(self, added: Sequence[int]) -> None:
        ranks = self._manager.grow(added)
        try:
            self._manager.confirm(ranks)
        except BaseException:
            self._manager.shrink(added)
            raise
        self._keep(ranks)

    def _shrink(self, leaving: Sequence[int], drain_timeout_s: float) -> None:
        keepers = [self._keepers[dp_rank] for dp_rank in leaving]
        for keeper in keepers:
            keeper.leave()
        for keeper in keepers:
            keeper.join(None)
        deadline_s = time.monotonic() + drain_timeout_s
        for dp_rank in leaving:
            self._listener.rank_leaving(dp_rank, max(0.0, deadline_s - time.monotonic()))
            del self._keepers[dp_rank]
        self._manager.shrink(leaving, _GET_TIMEOUT_S)

    # ---- what the keepers report

    def _keep(self, ranks: Sequence[Rank]) -> None:
        for rank in ranks:
            assert rank.info is not None, "confirm() comes first"
            self._listener.rank_up(rank.dp_rank, rank.actor, rank.info)
            keeper = _Keeper(rank, self._manager, self._listener, self._config, self._give_up)
            self._keepers[rank.dp_rank] = keeper
            keeper.start()

    def _give_up(self, dp_rank: int, error: EngineDeadError) -> None:
        """A rank won't come back. As long as another may, the engine goes on."""
        with self._lock:
            others = [keeper for rank, keeper in self._keepers.items() if rank != dp_rank and not keeper.has_given_up]
            self._keepers[dp_rank].has_given_up = True
            if others or self._stopping.is_set():
                logger.error("rank dp%d is given up; %d others go on. %s", dp_rank, len(others), error)
                return
            self._cause = error
        self._listener.engine_lost(error)
        self._ended.set()


class _Keeper:
    """One rank's thread."""

    def __init__(
        self,
        rank: Rank,
        manager: CoreEngineActorManager,
        listener: RankListener,
        config: RecoveryConfig,
        give_up: Callable[[int, EngineDeadError], None],
    ) -> None:
        self.has_given_up = False
        self._rank = rank
        self._manager = manager
        self._listener = listener
        self._config = config
        self._give_up = give_up
        self._budget = RestartBudget(config)
        self._leaving = threading.Event()
        self._suspicion: str | None = None
        self._next_drain_look_s = 0.0
        self._thread = threading.Thread(target=self._keep, name=f"raycore-keeper-dp{rank.dp_rank}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """End: the rank is to be stopped, or everything."""
        self._leaving.set()

    def suspect(self, reason: str) -> None:
        """Have the rank ended and replaced."""
        self._suspicion = reason

    def join(self, timeout_s: float | None) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _keep(self) -> None:
        dp_rank = self._rank.dp_rank
        try:
            while not self._leaving.is_set():
                lost = self._wait_for_end()
                if self._leaving.is_set():
                    return
                if lost is not None:
                    logger.error("%s", lost)
                    self._listener.rank_lost(dp_rank, lost)
                else:
                    lost = EngineDeadError(f"{describe_rank(self._rank.info, dp_rank)}: its node is being drained")
                if not self._replace(lost):
                    return
        except Exception as error:  # the thread's outermost frame: without it nobody would learn of any death
            if not self._leaving.is_set():
                logger.exception("the watch over dp_rank %d failed", dp_rank)
                lost = EngineDeadError(f"{error}\ndp_rank {dp_rank} can't be watched any more")
                self._listener.rank_lost(dp_rank, lost)
                self._give_up(dp_rank, lost)

    # ---- while it runs

    def _wait_for_end(self) -> EngineDeadError | None:
        """Why the rank is gone; None when it has been taken off a node that is going, or the keeper is to end."""
        rank = self._rank
        assert rank.run_ref is not None, "confirm() comes first"
        self._suspicion = None
        watchdog = Watchdog(rank.actor, self._config.step_timeout_s)
        while not self._leaving.is_set():
            done, _ = ray.wait([rank.run_ref], timeout=_LOOK_S)
            if done:
                return self._loss(_error_of(rank.run_ref))
            stalled = self._suspicion or watchdog.look(self._listener.is_busy(rank.dp_rank))
            if stalled is not None:
                # its callers needn't wait for its death, which Ray may be slow to see
                self._manager.kill(rank.dp_rank)
                return EngineDeadError(f"{describe_rank(rank.info, rank.dp_rank)} was killed: {stalled}")
            if self._is_node_going():
                self._listener.rank_leaving(rank.dp_rank, self._config.drain_timeout_s)
                return None
        return None

    def _loss(self, error: RayError | None) -> EngineDeadError:
        dead = EngineDeadError(describe_loss(error, self._rank.info, self._rank.dp_rank))
        dead.__cause__ = error
        return dead

    def _is_node_going(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_drain_look_s:
            return False
        self._next_drain_look_s = now_s + _DRAIN_LOOK_S
        going = {node.node_id for node in read_cluster().nodes if node.draining}
        return not going.isdisjoint(self._rank.nodes)

    # ---- when it has ended

    def _replace(self, lost: EngineDeadError) -> bool:
        """Put another rank in its place, however many attempts that takes. False when there is no use, or to end."""
        dp_rank, last = self._rank.dp_rank, lost
        started_s = time.monotonic()
        while not self._leaving.is_set():
            delay_s = self._budget.next_delay_s(time.monotonic())
            if delay_s is None:
                self._manager.kill(dp_rank)
                text = f"{last}\ndp_rank {dp_rank} was started {self._config.max_rank_restarts} times within "
                self._give_up(dp_rank, EngineDeadError(f"{text}{self._config.restart_window_s:g} s: giving it up"))
                return False
            if self._leaving.wait(delay_s):
                return False
            try:
                self._rank = self._find_place(dp_rank)
                self._manager.confirm([self._rank])
            except (RaycoreError, PlacementShortage, RayError) as error:
                if not self._leaving.is_set():
                    logger.error("dp_rank %d could not be started again: %s", dp_rank, error)
                last = EngineDeadError(f"{error}\nwhen it was started again after: {lost}")
                continue
            assert self._rank.info is not None
            self._listener.rank_up(dp_rank, self._rank.actor, self._rank.info)
            logger.warning("rank dp%d serves again, %.1f s after its end", dp_rank, time.monotonic() - started_s)
            return True
        return False

    def _find_place(self, dp_rank: int) -> Rank:
        """The rank's successor, yet to be confirmed; waits for a place while others hold it."""
        deadline_s = time.monotonic() + self._config.placement_timeout_s
        while True:
            try:
                (rank,) = self._manager.replace([dp_rank])
                return rank
            except PlacementShortage:
                if self._leaving.is_set() or time.monotonic() > deadline_s:
                    raise


def _error_of(ref: ray.ObjectRef[Any]) -> RayError | None:
    try:
        ray.get(ref, timeout=_GET_TIMEOUT_S)
    except RayError as error:
        return error
    return None
