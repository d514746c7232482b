"""Which weights an engine's ranks have to have, and where ranks that join get them.

A rank that starts has the weights of a checkpoint. If the engine's weights have changed since, the rank gets them
before it serves: from the checkpoint that they came from, or else from a rank that has them. If neither is possible,
the rank is *stale*: it isn't in service until an update brings it all weights. `parts/weights/control/updates.py` makes
updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from ray.exceptions import RayError

from raycore.cluster.desired import Desired, DesiredNow, DesiredWeights
from raycore.cluster.failure_reports import root_cause
from raycore.cluster.following import DesiredPart, IsWanted, check_wanted
from raycore.cluster.rank import Rank
from raycore.cluster.runtime import Runtime
from raycore.engine.rank_events import RankListener, RankUp
from raycore.errors import RpcTimeout
from raycore.messages import FIRST_WEIGHTS, WeightVersion
from raycore.ray_api import has_ended

if TYPE_CHECKING:
    from ray import ObjectRef

logger = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.25
_GRACE_S = 2.0
"""How many seconds longer than the driver a rank waits, so that the driver reports a rank that is late."""


class OnStaleRank(Protocol):
    """What is called when a rank has no weights that it may serve with."""

    def __call__(self, dp_rank: int, reason: str, /) -> object:
        """Take notice. Must return quickly."""
        ...


class EngineWeights(DesiredPart):
    """The weights of one engine. Thread-safe."""

    def __init__(self, desired: DesiredNow, runtime: Runtime, timeout_s: float, *, can_copy: bool) -> None:
        """
        Args:
            timeout_s: how long a rank may take to read or to get weights.
            can_copy: whether ranks have the same weights, so that one can get them from another.
        """
        self.stored = desired.now.weights
        """The latest that came from a checkpoint."""
        self.on_stale_rank: OnStaleRank = lambda dp_rank, reason: None
        self._desired = desired
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._can_copy = can_copy

    @property
    def latest(self) -> DesiredWeights:
        """The weights that ranks have to have."""
        return self._desired.now.weights

    def open(self) -> list[Rank]:
        """Begin an update. Returns the ranks that have joined."""
        with self._desired.changed:
            self._desired.change(is_updating=True, num_updates=self._desired.now.num_updates + 1)
            return [rank for rank in self._desired.ranks() if rank.has_joined]

    def await_ranks(
        self,
        ranks: Callable[[], Iterable[Rank]],
        timeout_s: float,
        is_wanted: Callable[[], bool],
        *,
        is_from_files: bool,
    ) -> None:
        """Before an update, wait for ranks that are just being replaced, at most `timeout_s` seconds.

        One rank is enough if those that come later can get weights from it or from files, and wouldn't be stale.

        Args:
            ranks: gives those that are there, or will be.
        """
        is_one_enough = self._can_copy or is_from_files
        clock = self._runtime.clock
        deadline_s = clock.now_s() + timeout_s
        with self._desired.changed:
            while is_wanted() and clock.now_s() < deadline_s:
                joined = [rank.has_joined for rank in ranks()]
                if any(joined) if is_one_enough else joined and all(joined):
                    return
                self._desired.changed.wait(_POLL_INTERVAL_S)

    def close(self) -> None:
        """End an update."""
        self._desired.change(is_updating=False)

    def set(self, latest: DesiredWeights, current: Iterable[Rank]) -> None:
        """Change which weights ranks have to have. `current`: those that have them."""
        with self._desired.changed:
            self._desired.change(weights=latest)
            if latest.path is not None:
                self.stored = latest
            for rank in current:
                rank.weights.number = latest.version.number

    def note_wake_up(self) -> None:
        """Weights have come back from a sleep, so that ranks that are just joining look again at what they have."""
        with self._desired.changed:
            self._desired.change(num_updates=self._desired.now.num_updates + 1)

    def rename(self, name: str) -> WeightVersion:
        """Change what the weights are called. Returns the version."""
        with self._desired.changed:
            latest = self._desired.now.weights
            version = WeightVersion(latest.version.number, name)
            self.set(msgspec.structs.replace(latest, version=version), [])
            return version

    # ---- what ranks have

    def loaded(self, rank: Rank, path: str) -> None:
        """Note which checkpoint a rank loads that starts, and after each deep sleep."""
        rank.weights.config_path = rank.weights.loaded_path = path

    def keep(self, ranks: Iterable[Rank]) -> None:
        """Note that ranks have the engine's weights: an update has changed nothing, or others have given them theirs.

        Ranks that were stale remain so.
        """
        for rank in ranks:
            rank.weights.number = None if rank.weights.is_stale else self.latest.version.number

    def took(self, ranks: Iterable[Rank]) -> None:
        """Note that ranks have taken what an update has brought."""
        for rank in ranks:
            rank.weights.is_stale, rank.weights.loaded_path = False, None

    def forget(self, ranks: Iterable[Rank]) -> None:
        """Note that it isn't known any more what weights ranks have."""
        for rank in ranks:
            rank.weights.number = rank.weights.loaded_path = None

    def make_stale(self, ranks: Sequence[Rank]) -> None:
        """Note that ranks have no weights that they may serve with."""
        self.forget(ranks)
        for rank in ranks:
            rank.weights.is_stale = True

    def read_again(self, ranks: Iterable[Rank]) -> None:
        """Note that ranks have read their own checkpoints, after a deep sleep."""
        for rank in ranks:
            rank.weights.number, rank.weights.loaded_path = None, rank.weights.config_path

    # ---- ranks get weights

    def follows(self, before: Desired, now: Desired) -> bool:
        return (before.weights, before.num_updates) == (now.weights, now.num_updates)

    def _donors(self, number: int) -> list[Rank]:
        """The ranks that have the engine's weights of this number, and can give them to others."""
        if not self._can_copy:
            return []
        return [
            rank
            for rank in self._desired.ranks()
            if rank.has_joined and not rank.weights.is_stale and rank.weights.number == number
        ]

    def bring(self, rank: Rank, desired: Desired, is_wanted: IsWanted) -> None:
        """Give a rank its weights, if that is possible. Otherwise it is stale. If the weights are asleep, it gets them
        when they wake up."""
        latest, before, held = desired.weights, rank.followed, rank.weights
        if before is not None and before.num_updates != desired.num_updates and held.loaded_path is None:
            held.number = None  # what it has got meanwhile may be of two versions
        if latest.is_missing:
            self.make_stale([rank])
            return
        try:
            reason = self._bring(rank, latest, is_wanted, is_asleep="weights" in desired.activity.asleep)
        except (RayError, RpcTimeout) as error:
            if has_ended(error):
                return  # it is replaced by those who watch it
            reason = str(root_cause(error))
        if reason is None:
            held.is_stale = False
            return
        held.number = None
        if not held.is_stale:
            held.is_stale = True
            logger.error(
                "dp_rank %d can't serve with weights of version %r, until an update brings all weights: %s",
                *(rank.dp_rank, latest.version.name, reason),
            )
            self.on_stale_rank(rank.dp_rank, reason)

    def _bring(self, rank: Rank, latest: DesiredWeights, is_wanted: IsWanted, *, is_asleep: bool) -> str | None:
        """Returns why the rank can't have the weights; None if it has them."""
        held, number = rank.weights, latest.version.number
        has_them = held.number == number or (latest.path is not None and held.loaded_path == latest.path)
        if has_them and latest.version == FIRST_WEIGHTS:
            held.number = number
            return None
        if not has_them:
            held.loaded_path = None
            if is_asleep:
                held.number = None
                return None
            reasons = self._get_weights(rank, latest, is_wanted)
            if reasons is not None:
                return reasons
        self._call(rank, "take_weights", (*latest.version, True, latest.key), is_wanted)
        held.number = number
        return None

    def _get_weights(self, rank: Rank, latest: DesiredWeights, is_wanted: IsWanted) -> str | None:
        if latest.path is not None:
            self._call(rank, "update_weights", ("reload_from", (latest.path,)), is_wanted)
            return None
        for donor in self._donors(latest.version.number):
            try:
                try:
                    pieces = self._call(donor, "update_weights", ("export_weights",), is_wanted)
                    self._call(rank, "update_weights", ("import_weights", (pieces,)), is_wanted)
                finally:  # also if only some workers have exported theirs
                    self._call(donor, "update_weights", ("release_exported_weights",), is_wanted)
                return None
            except (RayError, RpcTimeout) as error:
                text = "dp_rank %d can't get weights from dp_rank %d: %s"
                logger.warning(text, rank.dp_rank, donor.dp_rank, root_cause(error))
        return "they came from no checkpoint, and no other rank can give them"

    def _call(self, rank: Rank, method: str, args: tuple[Any, ...], is_wanted: IsWanted) -> Any:
        """Call a utility of a rank, and return its result.

        Raises:
            RayError: the rank is lost, or it raised an error.
            RpcTimeout: it hasn't replied in time.
            InitializationError: the result isn't wanted any more.
        """
        clock = self._runtime.clock
        deadline_s = clock.now_s() + self._timeout_s
        ref: ObjectRef[Any] = rank.actor.utility.remote(method, args, {}, self._timeout_s + _GRACE_S)
        while not self._runtime.wait([ref], num_returns=1, timeout_s=_POLL_INTERVAL_S)[0]:
            check_wanted(is_wanted)
            if clock.now_s() > deadline_s:
                raise RpcTimeout(f"dp_rank {rank.dp_rank} hasn't replied within {self._timeout_s:g} s")
        return self._runtime.get(ref)

    # ---- ranks in service

    def announce(self, listener: RankListener, ranks: Iterable[Rank]) -> None:
        """Tell the listener of ranks that are up, but not of those that are stale."""
        for rank in ranks:
            assert rank.info is not None, "confirm() comes first"
            with self._desired.changed:
                if rank.weights.is_stale or rank.is_announced:
                    continue
                rank.is_announced = True
                listener.on_rank_event(RankUp(rank.dp_rank, rank.actor, rank.info))

    def withdraw(self, listener: RankListener, ranks: Iterable[Rank]) -> None:
        """Have the listener move the requests of stale ranks to others."""
        for rank in ranks:
            with self._desired.changed:
                was_announced, rank.is_announced = rank.is_announced, False
            if was_announced:
                listener.ranks_leaving([rank.dp_rank], 0.0, come_back=True)
