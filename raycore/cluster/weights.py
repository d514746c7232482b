"""Which weights an engine's ranks have to have, and where ranks that join get them.

A rank that starts has the weights of a checkpoint. If the engine's weights have changed since, the rank gets them
before it serves: from the checkpoint that they came from, or else from a rank that has them. If neither is possible,
the rank is *stale*: it isn't in service until an update brings it all weights. `control/weight_updates.py` makes
updates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from ray.exceptions import RayError

from raycore.cluster.failure_reports import root_cause
from raycore.cluster.rank import Rank
from raycore.cluster.runtime import Runtime
from raycore.engine.rank_events import RankListener, RankUp
from raycore.errors import InitializationError, RpcTimeout
from raycore.messages import FIRST_WEIGHTS, WeightVersion
from raycore.ray_api import has_ended
from raycore.system import threading

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


class WeightState(msgspec.Struct, frozen=True):
    """The weights that an engine's ranks have to have."""

    version: WeightVersion
    path: str | None
    """The checkpoint that has these weights. None: only ranks have them."""
    key: str = ""
    """What all ranks know them by, if they came from no checkpoint: see `raycore.kv_transfer.identity`."""
    is_missing: bool = False
    """Whether nobody has them, as the engine has woken up without reading any. The next update has to bring all."""


class EngineWeights:
    """The weights of one engine. Thread-safe."""

    def __init__(self, path: str, runtime: Runtime, timeout_s: float, *, can_copy: bool) -> None:
        """
        Args:
            path: the checkpoint with which the engine starts.
            timeout_s: how long a rank may take to read or to get weights.
            can_copy: whether ranks have the same weights, so that one can get them from another.
        """
        self.state = WeightState(FIRST_WEIGHTS, path)
        self.stored = self.state
        """The latest state that came from a checkpoint."""
        self.on_stale_rank: OnStaleRank = lambda dp_rank, reason: None
        self.is_settling = False
        """Whether ranks get weights without an update, because a sleep has dropped theirs."""
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._can_copy = can_copy
        self._changed = threading.Condition()
        self._is_updating = False
        self._num_updates = 0
        """Number of changes that have begun."""

    @property
    def is_updating(self) -> bool:
        """Whether an update is under way. Ranks that join wait for its end."""
        return self._is_updating

    @property
    def is_changing(self) -> bool:
        """Whether the driver waits for ranks to change their weights."""
        return self._is_updating or self.is_settling

    def open(self, ranks: Callable[[], Iterable[Rank]]) -> list[Rank]:
        """Begin an update. Returns those of the ranks that have joined."""
        with self._changed:
            self._is_updating = True
            self._num_updates += 1
            return [rank for rank in ranks() if rank.has_joined]

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
        with self._changed:
            while is_wanted() and clock.now_s() < deadline_s:
                joined = [rank.has_joined for rank in ranks()]
                if any(joined) if is_one_enough else joined and all(joined):
                    return
                self._changed.wait(_POLL_INTERVAL_S)

    def close(self) -> None:
        """End an update."""
        with self._changed:
            self._is_updating = False
            self._changed.notify_all()

    def set(self, state: WeightState, current: Iterable[Rank]) -> None:
        """Change which weights ranks have to have. `current`: those that have them."""
        with self._changed:
            self.state = state
            if state.path is not None:
                self.stored = state
            for rank in current:
                rank.weights = state.version.number

    def note_wake_up(self) -> None:
        """Weights have come back from a sleep, so that ranks that are just joining look again at what they have."""
        with self._changed:
            self._num_updates += 1

    def rename(self, name: str) -> WeightVersion:
        """Change what the weights are called. Returns the version."""
        with self._changed:
            version = WeightVersion(self.state.version.number, name)
            if self.stored == self.state:
                self.stored = msgspec.structs.replace(self.state, version=version)
            self.state = msgspec.structs.replace(self.state, version=version)
            self._num_updates += 1
            return version

    # ---- ranks get weights

    def join(
        self,
        rank: Rank,
        others: Callable[[], Iterable[Rank]],
        is_wanted: Callable[[], bool],
        *,
        is_asleep: Callable[[], bool],
    ) -> None:
        """Give a rank, whose loop runs, the engine's weights. Waits for the end of an update.

        Args:
            others: the engine's other ranks.
            is_asleep: whether the ranks' weights are. The rank gets its weights when they wake up.

        Raises:
            InitializationError: the start isn't wanted any more.
        """
        while True:
            with self._changed:
                while self._is_updating:
                    self._changed.wait(_POLL_INTERVAL_S)
                    if not is_wanted():
                        raise InitializationError("the engine was shut down while it was starting")
                state, num_updates = self.state, self._num_updates
            self.bring(rank, state, self.donors(others()), is_wanted, is_asleep=is_asleep())
            with self._changed:
                # otherwise what the rank has got may be of two versions
                if self._num_updates == num_updates:
                    rank.has_joined = True
                    self._changed.notify_all()
                    return

    def donors(self, ranks: Iterable[Rank]) -> list[Rank]:
        """Those of the ranks that have the engine's weights, and can give them to others."""
        if not self._can_copy:
            return []
        return [
            rank
            for rank in ranks
            if rank.has_joined and not rank.is_stale and rank.weights == self.state.version.number
        ]

    def bring(
        self,
        rank: Rank,
        state: WeightState,
        donors: Sequence[Rank],
        is_wanted: Callable[[], bool] = lambda: True,
        *,
        is_asleep: bool = False,
    ) -> None:
        """Give a rank these weights, if that is possible. Otherwise it is stale."""
        if state.is_missing:
            rank.weights = rank.loaded_path = None
            rank.is_stale = True
            return
        try:
            reason = self._bring(rank, state, donors, is_wanted, is_asleep)
        except (RayError, RpcTimeout) as error:
            if has_ended(error):
                return  # it is replaced by those who watch it
            reason = str(root_cause(error))
        if reason is None:
            rank.is_stale = False
            return
        rank.weights = None
        if not rank.is_stale:
            rank.is_stale = True
            logger.error(
                "dp_rank %d can't serve with weights of version %r, until an update brings all weights: %s",
                *(rank.dp_rank, state.version.name, reason),
            )
            self.on_stale_rank(rank.dp_rank, reason)

    def _bring(
        self, rank: Rank, state: WeightState, donors: Sequence[Rank], is_wanted: Callable[[], bool], is_asleep: bool
    ) -> str | None:
        """Returns why the rank can't have the weights; None if it has them."""
        has_them = rank.weights == state.version.number or (state.path is not None and rank.loaded_path == state.path)
        if has_them and state.version == FIRST_WEIGHTS:
            rank.weights = state.version.number
            return None
        if not has_them:
            rank.loaded_path = None
            if is_asleep:
                rank.weights = None
                return None
            reasons = self._get_weights(rank, state, donors, is_wanted)
            if reasons is not None:
                return reasons
        self.call(rank, "take_weights", (*state.version, True, state.key), is_wanted)
        rank.weights = state.version.number
        return None

    def _get_weights(
        self, rank: Rank, state: WeightState, donors: Sequence[Rank], is_wanted: Callable[[], bool]
    ) -> str | None:
        if state.path is not None:
            self.call(rank, "update_weights", ("reload_from", (state.path,)), is_wanted)
            return None
        for donor in donors:
            try:
                try:
                    pieces = self.call(donor, "update_weights", ("export_weights",), is_wanted)
                    self.call(rank, "update_weights", ("import_weights", (pieces,)), is_wanted)
                finally:  # also if only some workers have exported theirs
                    self.call(donor, "update_weights", ("release_exported_weights",), is_wanted)
                return None
            except (RayError, RpcTimeout) as error:
                text = "dp_rank %d can't get weights from dp_rank %d: %s"
                logger.warning(text, rank.dp_rank, donor.dp_rank, root_cause(error))
        return "they came from no checkpoint, and no other rank can give them"

    def call(self, rank: Rank, method: str, args: tuple[Any, ...], is_wanted: Callable[[], bool]) -> Any:
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
            if not is_wanted():
                raise InitializationError("the engine was shut down while it was starting")
            if clock.now_s() > deadline_s:
                raise RpcTimeout(f"dp_rank {rank.dp_rank} hasn't replied within {self._timeout_s:g} s")
        return self._runtime.get(ref)

    # ---- ranks in service

    def announce(self, listener: RankListener, ranks: Iterable[Rank]) -> None:
        """Tell the listener of ranks that are up, but not of those that are stale."""
        for rank in ranks:
            assert rank.info is not None, "confirm() comes first"
            with self._changed:
                if rank.is_stale or rank.is_announced:
                    continue
                rank.is_announced = True
                listener.on_rank_event(RankUp(rank.dp_rank, rank.actor, rank.info))

    def withdraw(self, listener: RankListener, ranks: Iterable[Rank]) -> None:
        """Have the listener move the requests of stale ranks to others."""
        for rank in ranks:
            with self._changed:
                was_announced, rank.is_announced = rank.is_announced, False
            if was_announced:
                listener.ranks_leaving([rank.dp_rank], 0.0, come_back=True)
