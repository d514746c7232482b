"""Watches one failure domain, and replaces its ranks when they are lost."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ray.exceptions import RayError

from placement.errors import PlacementGroupRemoved, PlacementShortage
from raycore.cluster.failure_reports import describe_death, describe_rank, owner_death
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.rank import Rank
from raycore.cluster.restart_budget import RestartBudget
from raycore.cluster.runtime import RankWatch
from raycore.cluster.watchdog import Watchdog
from raycore.config import RecoveryConfig
from raycore.engine.rank_events import LossExplained, RankListener, RanksLost
from raycore.errors import EngineDeadError, RaycoreError
from raycore.parts.servers.values import RoundOver
from raycore.recurring import Recurring
from raycore.system import threading

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.5
"""Interval, in seconds, at which a thread checks for stalls, drained nodes, and whether to end. The end of a rank wakes
the thread at once."""

_MAX_CHECKS_PER_S = 512
"""Of all ranks together. With more ranks, each is checked more rarely."""


@dataclass(frozen=True)
class Loss:
    """Ranks that have to be replaced: they have failed, or their node is being drained."""

    number: int
    """By which `RanksLost` and `LossExplained` name the loss, if the ranks have failed."""
    dp_ranks: Sequence[int]
    cause: EngineDeadError
    """Without the last lines that the dead process logged."""
    is_free: bool = False
    """Whether the first replacement doesn't count as a restart: nothing of this engine has failed."""


class Stall(NamedTuple):
    """Why the ranks are killed, though none of them has ended."""

    dp_rank: int
    reason: str
    is_free: bool = False
    """See `Loss`."""


class RankMonitor:
    """The thread that watches one failure domain and replaces its ranks."""

    def __init__(
        self,
        ranks: Sequence[Rank],
        manager: CoreEngineActorManager,
        listener: RankListener,
        config: RecoveryConfig,
        give_up: Callable[[RankMonitor, EngineDeadError], None],
        next_loss: Callable[[], int],
        draining: Callable[[], Collection[str]],
        serving: Callable[[], Sequence[int]],
    ) -> None:
        """Create a monitor. `start()` starts its thread.

        Args:
            give_up: called when the ranks have failed for good.
            next_loss: returns a new number, by which `RanksLost` and `LossExplained` name a loss.
            draining: returns the ids of the nodes that are being drained.
            serving: returns the ranks of the engine that serve.
        """
        self.has_given_up = False
        self.is_serving = True
        """Whether the ranks aren't being replaced."""
        self.shortage = ""
        """What is missing in the cluster while there is no room for the ranks; empty if there is."""
        self.num_restarts = 0
        self.has_replaced = threading.Event()
        """Set once the ranks have been replaced."""
        self._ranks = list(ranks)
        self._dp_ranks = [rank.dp_rank for rank in ranks]
        self._manager = manager
        self._runtime = manager.runtime
        self._clock = self._runtime.clock
        self._listener = listener
        self._config = config
        self._give_up = give_up
        self._next_loss = next_loss
        self._draining = draining
        self._serving = serving
        self._unexplained: int | None = None
        """The number of the latest loss, until the listener gets the explanation; otherwise None."""
        self._budget = RestartBudget(config)
        self._leaving = threading.Event()
        self._suspicion: Stall | None = None
        self._shortages = Recurring(now_s=self._clock.now_s)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        name = "raycore-monitor-dp" + "-".join(map(str, self._dp_ranks))
        self._thread = self._clock.start_thread(name, self._run)

    def leave(self) -> None:
        """Stop watching, because the ranks or the whole engine are about to be stopped."""
        self._leaving.set()

    def suspect(self, dp_rank: int, reason: str, *, is_free: bool = False) -> None:
        """Have the failure domain killed and replaced, because of `reason`, which concerns `dp_rank`.

        `is_free`: see `Loss`.
        """
        self._suspicion = Stall(dp_rank, reason, is_free)

    def join(self, timeout_s: float | None) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while not self._leaving.is_set():
                with closing(self._runtime.watch(self._ranks, self._manager.node)) as ends:
                    loss = self._wait_for_loss(ends)
                if loss is None or not self._replace(loss):
                    return
        except Exception as error:  # otherwise the thread would end, and no failure would be noticed
            if not self._leaving.is_set():
                logger.exception("the monitor of dp_ranks %s failed", self._dp_ranks)
                blind = EngineDeadError(
                    f"{error}\ndp_ranks {self._dp_ranks} can no longer be monitored, and count as failed"
                )
                self._explain_loss(self._unexplained or self._tell_of_loss(), blind)
                try:
                    for dp_rank in self._dp_ranks:  # whoever asks all ranks would wait for these
                        self._manager.kill(dp_rank)
                finally:
                    self._give_up(self, blind)

    def _tell_of_loss(self) -> int:
        """Tell the listener that the ranks are lost. Returns the number of the loss."""
        number = self._unexplained = self._next_loss()
        self._listener.on_rank_event(RanksLost(self._dp_ranks, number))
        return number

    def _tell_cause(self, loss: Loss) -> None:
        error = loss.cause
        try:
            error = self._with_last_lines(loss.cause)
            logger.error("%s", error)
        finally:
            self._explain_loss(loss.number, error)

    def _explain_loss(self, number: int, error: EngineDeadError) -> None:
        self._listener.on_rank_event(LossExplained(number, error))
        if self._unexplained == number:
            self._unexplained = None

    def _with_last_lines(self, dead: EngineDeadError) -> EngineDeadError:
        """Add the last lines of the dead process. Takes up to a second if the process was on another node."""
        text = self._runtime.with_last_lines(str(dead), dead.pid, dead.node)
        told = EngineDeadError(text, pid=dead.pid, node=dead.node)
        told.__cause__ = dead.__cause__
        return told

    # ---- while they run

    def _wait_for_loss(self, ends: RankWatch) -> Loss | None:
        """Wait until a rank ends or stalls, and tell the listener. Returns None if the monitor must end.

        If a node of the ranks is being drained, returns when their requests have finished or moved.
        """
        watchdogs = {
            rank.dp_rank: Watchdog(rank.actor, self._config.step_timeout_s, self._runtime) for rank in self._ranks
        }
        while not self._leaving.is_set():
            ended = ends.wait(max(POLL_INTERVAL_S, len(self._manager.ranks) / _MAX_CHECKS_PER_S))
            stalled = self._kill_stalled(watchdogs) if ended is None else None
            noticed = ended or stalled
            if self._leaving.is_set():
                return None
            if noticed is not None:
                number = self._tell_of_loss()
                # before the manager kills the domain's other ranks, which Ray would report as the cause
                is_free = ended is None and self._suspicion is not None and self._suspicion.is_free
                loss = Loss(number, self._dp_ranks, noticed if ended is None else ends.explain(ended), is_free)
                if self._runtime.ended_with_owner():  # as planned: the ranks have ended with it
                    return None
                # on a thread, because the replacement must not wait for log lines from another node
                self._clock.start_thread("raycore-last-lines", partial(self._tell_cause, loss))
                return loss
            if self._is_node_going():
                self._listener.ranks_leaving(self._dp_ranks, self._manager.drain_timeout_s(), come_back=True)
                cause = EngineDeadError(f"a node that runs dp_ranks {self._dp_ranks} is being drained")
                return Loss(self._next_loss(), self._dp_ranks, cause)
        return None

    def _kill_stalled(self, watchdogs: dict[int, Watchdog]) -> EngineDeadError | None:
        """If a rank has stalled or was reported, kill the ranks, and return an error that says why."""
        stalled = self._suspicion or self._ask(watchdogs)
        if stalled is None:
            return None
        dp_rank, reason, _ = stalled
        # don't wait until Ray notices that they are dead, which may take long
        for each in self._dp_ranks:
            self._manager.kill(each)
        info = self._ranks[self._dp_ranks.index(dp_rank)].info
        pid, node = (None, None) if info is None else (info.pid, info.node_id)
        return EngineDeadError(f"{describe_rank(info, dp_rank)} was killed: {reason}", pid=pid, node=node)

    def _ask(self, watchdogs: dict[int, Watchdog]) -> Stall | None:
        """The first rank that has stalled; None if none has."""
        # ranks in lockstep run every step together: if one of them has work, all of them must make progress
        is_busy = self._manager.desired.is_changing or any(self._listener.is_busy(dp_rank) for dp_rank in watchdogs)
        for dp_rank, watchdog in watchdogs.items():
            reason = watchdog.look(is_busy)
            if reason is not None:
                return Stall(dp_rank, reason)
        return None

    def _is_node_going(self) -> bool:
        going = self._draining()
        return any(node in going for rank in self._ranks for node in rank.nodes)

    # ---- when they have ended

    def _is_disowned(self, error: BaseException | None) -> bool:
        """Whether a rank ended, or didn't start, because Ray takes this process for dead. Then the ranks are given up:
        it would be so with each attempt.
        """
        why = owner_death(error)
        if why is None:
            return False
        dead = EngineDeadError(
            "Ray takes this process for dead, so it has ended the engine's ranks and starts no others. Start the "
            f"program again. Ray says: {why}"
        )
        dead.__cause__ = error
        self._give_up(self, dead)
        return True

    def _replace(self, loss: Loss) -> bool:
        """Replace the ranks, in several attempts if necessary.

        Returns False if the ranks were given up, or if the monitor must end.
        """
        failed: EngineDeadError | None = None
        self.is_serving = False
        started_s, is_free = self._clock.now_s(), loss.is_free
        if self._is_disowned(loss.cause.__cause__):
            return False
        while not self._leaving.is_set():
            delay_s = 0.0 if is_free else self._budget.next_delay_s(self._clock.now_s(), started_s)
            if delay_s is None:
                for dp_rank in loss.dp_ranks:
                    self._manager.kill(dp_rank)
                used = f"max_rank_restarts={self._config.max_rank_restarts}"
                window = f"restart_window_s={self._config.restart_window_s:g}"
                why = failed or self._with_last_lines(loss.cause)
                text = f"{why}\ndp_ranks {loss.dp_ranks} have used up {used} within {window}"
                self._give_up(self, EngineDeadError(text))
                return False
            if self._clock.wait(self._leaving, delay_s):
                return False
            try:
                self._ranks = self._manager.replace(
                    loss.dp_ranks, lambda: not self._leaving.is_set(), self._note_shortage
                )
                self._note_room()
                self._manager.confirm(self._ranks)
            except (RaycoreError, PlacementShortage, PlacementGroupRemoved, RayError) as error:
                why = describe_death(error)
                if isinstance(error, PlacementShortage):
                    if self._serving() and not is_free:
                        self._budget.give_back()  # the others serve for as long as there is no room
                elif not self._leaving.is_set():
                    logger.error("an attempt to restart dp_ranks %s failed: %s", loss.dp_ranks, why)
                failed = EngineDeadError(
                    f"{why}\ndp_ranks {loss.dp_ranks} were being restarted after: {self._with_last_lines(loss.cause)}"
                )
                is_free = isinstance(error, RoundOver)
                if self._is_disowned(error):
                    return False
                if isinstance(error, PlacementGroupRemoved):  # another attempt would find the same
                    self._give_up(self, failed)
                    return False
                continue
            self.is_serving = True
            self._suspicion = None  # concerned the previous ranks
            self.num_restarts += 1
            self._manager.weights.announce(self._listener, self._ranks)
            self.has_replaced.set()
            took_s = self._clock.now_s() - started_s
            logger.warning("dp_ranks %s were replaced and are serving again, after %.1f s", loss.dp_ranks, took_s)
            return True
        return False

    def _note_shortage(self, missing: str, nodes: frozenset[str]) -> None:
        self.shortage = missing
        serving = sorted(self._serving())
        if self._shortages.is_due((nodes, tuple(serving))):
            meanwhile = f"dp_ranks {serving} serve meanwhile" if serving else "no rank serves meanwhile"
            text = "there is no room for dp_ranks %s, which start as soon as there is, and %s: %s"
            logger.warning(text, self._dp_ranks, meanwhile, missing)

    def _note_room(self) -> None:
        self.shortage = ""
        if self._shortages.end():
            logger.warning("there is room for dp_ranks %s again: they start", self._dp_ranks)
