"""Pauses a running engine, puts it to sleep, and lets it continue.

Every call has two sides. Clients pause new requests while the engine is paused, so they know which requests came
before the pause. Ranks stop between two steps, and give up memory. The manager keeps the engine's activity: ranks that
join a paused or sleeping engine, for example because one was lost, are told when they start.

A rank that is lost during a call is no error. Its requests move to other ranks, which are paused, too. `EngineCalls`
documents the calls.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, cast, get_args

from raycore.activity import RUNNING, TAGS, Activity, MemoryTag, PauseMode
from raycore.client.group import ClientGroup, RankReply
from raycore.cluster.manager import CoreEngineActorManager
from raycore.cluster.supervisor import Supervisor
from raycore.control.replies import GRACE_S, check_running, take_replies
from raycore.errors import InvalidInput, RaycoreError, WorkerFailed
from raycore.system import threading

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.cluster.rank import Rank

logger = logging.getLogger(__name__)

_WAKE_TAGS = (*TAGS, "scheduling")

_RECEIVE_TIMEOUT_S = 60.0
"""How long clients may take to receive the outputs that ranks have sent. That takes milliseconds."""


class OnWoken(Protocol):
    """What is called when weights have come back from a sleep, before the engine continues."""

    def __call__(self, *, were_dropped: bool, are_read: bool) -> object:
        """
        Args:
            were_dropped: whether they were given up, and not only moved.
            are_read: whether they were read from the checkpoint then.
        """
        ...


class Pauses:
    """The pauses and sleeps of one engine. Thread-safe: calls wait for each other.

    Only a pause that waits for requests doesn't hold up other calls: it is cancelled.
    """

    def __init__(
        self, manager: CoreEngineActorManager, supervisor: Supervisor, clients: ClientGroup, timeout_s: float
    ) -> None:
        """`timeout_s`: how long a rank may take to follow a change. One that takes longer is replaced."""
        self._manager = manager
        self._supervisor = supervisor
        self._clients = clients
        self._timeout_s = timeout_s
        self._changing = threading.Lock()
        self._waiting: set[object] = set()
        """Has an item for each call that waits for another one: calls add theirs without a lock."""
        self._waits_for_requests = False
        self._stays_paused = False
        """Whether the user has paused the engine."""
        self._is_held = False
        """Whether weights are being updated, so that no step may run."""
        self.on_woken: OnWoken | None = None

    @property
    def activity(self) -> Activity:
        """What the engine does."""
        return self._manager.desired.now.activity

    def pause(self, mode: PauseMode = "abort", clear_cache: bool = True, sleep_level: int = 0) -> None:
        """Pause the engine, and put it to sleep if `sleep_level` isn't 0."""
        _check_mode(mode)
        self._manager.servers.check_alone()
        with self._next_change():
            if self._is_held and (mode == "wait" or sleep_level > 0):
                what = "sleep()" if sleep_level > 0 else "mode='wait'"
                raise InvalidInput(
                    f"{what}: weights are being updated: call finish_weight_update() or cancel_weight_update() first"
                )
            self._pause(mode, clear_cache)
            self._stays_paused = True
            if sleep_level > 0:
                self._set(self.activity.put_to_sleep(sleep_level))

    def resume(self) -> None:
        """End a pause."""
        with self._next_change():
            if self.activity.asleep:
                raise InvalidInput(
                    "resume_generation(): the engine is asleep, so it has no memory to run with: call wake_up()"
                )
            self._stays_paused = False
            if not self._is_held:
                self._resume()

    def hold(self, call: str) -> None:
        """Have no step run until `release()`, whatever pauses come meanwhile. Frozen requests stay.

        Raises:
            InvalidInput: the weights are asleep, or ranks of other servers share experts with these. `call` is what
                errors name.
        """
        self._manager.servers.check_alone()
        with self._next_change():
            if "weights" in self.activity.asleep:
                raise InvalidInput(f"{call}: the weights are asleep: call wake_up(tags=['weights']) first")
            if not self.activity.is_paused:
                try:
                    self._pause("keep", clear_cache=False)
                except BaseException:
                    self._resume()  # nobody else would
                    raise
            self._is_held = True

    def release(self) -> None:
        """End what `hold()` has begun. The engine continues unless it is paused or asleep."""
        with self._next_change():
            self._is_held = False
            if not self._stays_paused:
                self._resume()

    def wake_up(self, tags: Sequence[str] | None = None, reads_weights: bool = True) -> bool:
        """Wake the memory `tags`, or all. Returns whether everything is awake, and the engine runs again.

        `reads_weights`: see `Activity.reads_weights`.
        """
        unknown = [tag for tag in tags or () if tag not in _WAKE_TAGS]
        if isinstance(tags, str) or unknown:
            raise InvalidInput(f"wake_up(): tags={tags!r} isn't a list of {', '.join(map(repr, _WAKE_TAGS))}")
        with self._next_change():
            woken = self.activity.woken(
                cast(Sequence[MemoryTag], TAGS if tags is None else tags), reads_weights=reads_weights
            )
            before = self.activity
            if before.asleep:
                # all ranks before any of them runs: ranks that share experts need each other's memory
                try:
                    self._set(woken)
                finally:  # if a worker has failed, the weights of the other ranks have come back nevertheless
                    wakes = "weights" in woken.waking_from(before) and not self._supervisor.has_ended
                    if self.on_woken is not None and wakes:
                        self.on_woken(were_dropped=before.sleep_level > 1, are_read=reads_weights)
            if woken.asleep:
                return False
            self._stays_paused = False
            if self._is_held:
                return False
            self._resume()
            return True

    # ---- details

    @contextmanager
    def _next_change(self) -> Generator[None, None, None]:
        """Wait until other changes are over. Ends the wait of a pause for requests to finish."""
        call = object()
        self._waiting.add(call)
        try:
            if self._waits_for_requests:
                self._clients.resume_new()
            with self._changing:
                self._waiting.discard(call)
                check_running(self._supervisor)
                yield
        finally:  # it may have been interrupted before
            self._waiting.discard(call)

    def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "wait" and self.activity.is_paused:
            if self.activity.asleep:
                raise InvalidInput("mode='wait': the engine is asleep, so no request can finish: call wake_up() first")
            self._resume()
        self._clients.pause_new()
        if mode == "wait":
            self._wait_for_requests()
        replies = self._set(self.activity.paused(), clear_cache)
        if not self._clients.complete_pause(replies, mode == "abort", _RECEIVE_TIMEOUT_S):
            check_running(self._supervisor)
            raise RaycoreError(f"the outputs of ranks that have paused didn't arrive within {_RECEIVE_TIMEOUT_S:g} s")

    def _wait_for_requests(self) -> None:
        self._waits_for_requests = True
        try:
            if self._waiting:
                self._clients.resume_new()
            is_done = self._clients.wait_for_older()
        finally:
            self._waits_for_requests = False
        check_running(self._supervisor)
        if not is_done:
            raise RaycoreError("the pause was cancelled by another call before all requests had finished")

    def _resume(self) -> None:
        if self.activity != RUNNING:
            self._set(RUNNING)
        self._clients.resume_new()

    def _set(self, activity: Activity, clear_cache: bool = False) -> dict[int, RankReply]:
        """Tell all ranks what to do, and wait until they do it.

        Returns: the ranks' replies, by dp_rank, without those of ranks that were lost. Ranks that join later follow the
        activity, too, and have sent nothing.

        Raises:
            WorkerFailed: a worker failed to follow. Its rank is replaced.
            EngineDeadError: the engine has failed, or was shut down.
        """
        with self._manager.desired.together():
            try:
                ranks = self._manager.desired.change(activity=activity)
                timeout_s = self._timeout_s + GRACE_S
                asked = {rank.actor.set_activity.remote(activity, clear_cache, timeout_s): rank for rank in ranks}
                return self._take_replies(asked)
            finally:
                check_running(self._supervisor)

    def _take_replies(self, asked: dict[ObjectRef[dict[int, int]], Rank]) -> dict[int, RankReply]:
        replies = take_replies(asked, self._timeout_s, lambda: self._supervisor.has_ended)
        for rank, error in replies.errors:
            if not isinstance(error, WorkerFailed):
                logger.warning("dp_rank %d was lost while its activity changed: %s", rank.dp_rank, error)
        for rank in replies.late:
            # its replacement follows the activity
            self._supervisor.report(rank.dp_rank, f"it hasn't paused, slept or woken up within {self._timeout_s:g} s")
        for _, error in replies.errors:
            if isinstance(error, WorkerFailed):
                raise error
        by_rank: dict[int, RankReply] = {}
        for rank, num_sent in replies.results:
            assert rank.info is not None, "confirm() comes first"
            by_rank[rank.dp_rank] = RankReply(rank.info.pid, num_sent)
        return by_rank


def _check_mode(mode: str) -> None:
    if mode not in get_args(PauseMode):
        raise InvalidInput(f"mode={mode!r} isn't 'abort', 'wait' or 'keep'")
