"""Brings ranks that join an engine to what is desired of all its ranks (`desired.py`).

What a rank has to be brought to has parts. A part says how a rank gets it, and nothing else knows which parts there
are. A new one is a field of `Desired`, and a `DesiredPart` in the list that the manager makes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ray.exceptions import RayError

from raycore.cluster.desired import Desired, DesiredNow
from raycore.cluster.rank import Rank
from raycore.cluster.runtime import Runtime
from raycore.errors import InitializationError

if TYPE_CHECKING:
    from ray import ObjectRef

    from raycore.engine.engine_actor import DPEngineCoreActor

logger = logging.getLogger(__name__)

IsWanted = Callable[[], bool]
"""Called several times a second. If it returns False, the rank isn't wanted any more."""
Wait = Callable[[float, IsWanted], object]
"""Waits until ranks have done what they were told, until a time of the runtime's clock. Raises InitializationError if
they aren't wanted any more, or are late."""

_POLL_INTERVAL_S = 0.25


def check_wanted(is_wanted: IsWanted) -> None:
    """Raise InitializationError if ranks that are starting aren't wanted any more."""
    if not is_wanted():
        raise InitializationError("the engine was shut down while it was starting")


def no_wait(deadline_s: float, is_wanted: IsWanted) -> None:
    """A `Wait` for nothing."""


class DesiredPart:
    """How ranks that join get a part of what is desired. What a part doesn't need does nothing.

    A part that ranks hear of in `tell()` is always current: later changes are told to all ranks that run. One that
    takes long, or needs other ranks, is brought in `bring()`, again and again until it hasn't changed meanwhile.
    """

    def tell(self, ranks: Sequence[Rank], desired: Desired) -> Wait:
        """Tell new ranks, which are up and don't run yet. Called in the order of the parts, once for ranks that start
        together, with the lock of what is desired: must return at once.

        Returns: waits until they have done it.
        """
        return no_wait

    def bring(self, rank: Rank, desired: Desired, is_wanted: IsWanted) -> None:
        """Bring a rank, whose loop runs, what it lacks.

        Raises InitializationError if the rank isn't wanted any more.
        """

    def follows(self, before: Desired, now: Desired) -> bool:
        """Whether a rank that was brought to `before` follows `now`, too. Called with the lock of what is desired."""
        return True


class Following:
    """Brings the ranks of one engine to what is desired. Thread-safe."""

    def __init__(self, desired: DesiredNow, parts: Sequence[DesiredPart]) -> None:
        self._desired = desired
        self._parts = parts

    def follow(self, ranks: Sequence[Rank], deadline_s: float, is_wanted: IsWanted) -> None:
        """Start the loops of new ranks, and let those join that await no group.

        `deadline_s`: the time of the runtime's clock until which they may take to do what they are told.

        Raises:
            InitializationError: they are late, or aren't wanted any more.
        """
        with self._desired.changed:
            waits = [part.tell(ranks, self._desired.now) for part in self._parts]
        for wait in waits:
            wait(deadline_s, is_wanted)
        for rank in ranks:
            if not rank.awaits_group:
                self.join(rank, is_wanted)

    def join(self, rank: Rank, is_wanted: IsWanted) -> None:
        """Bring a rank, whose loop runs, to what is desired. Waits for the end of an update of weights.

        Raises:
            InitializationError: the rank isn't wanted any more.
        """
        state = self._desired
        while True:
            with state.changed:
                while state.now.is_updating:
                    state.changed.wait(_POLL_INTERVAL_S)
                    check_wanted(is_wanted)
                desired = state.now
            for part in self._parts:
                part.bring(rank, desired, is_wanted)
            rank.followed = desired
            with state.changed:
                if all(part.follows(desired, state.now) for part in self._parts):
                    rank.has_joined = True
                    state.changed.notify_all()
                    return


class Loops(DesiredPart):
    """Starts the loops of ranks, in the activity that is desired."""

    def __init__(
        self,
        is_lockstep: Callable[[], bool],
        others: Callable[[Sequence[Rank]], tuple[list[list[DPEngineCoreActor]], Wait]],
    ) -> None:
        """`others`: returns what ranks are told of those of other servers, which they wait for. See `Servers`."""
        self._is_lockstep = is_lockstep
        self._others = others

    def tell(self, ranks: Sequence[Rank], desired: Desired) -> Wait:
        others, wait = self._others(ranks)
        for rank in ranks:
            peers = [other.actor for other in ranks if other is not rank] if self._is_lockstep() else []
            rank.run_ref = rank.actor.run.remote(peers, desired.activity, *others)
        return wait


class HeldAdapters(DesiredPart):
    """Has new ranks read the adapters that were added: as many as they have slots for."""

    def __init__(self, runtime: Runtime, timeout_s: float, num_adapters: int) -> None:
        """
        Args:
            timeout_s: how long ranks may take to start, as errors name it.
            num_adapters: how many a rank has slots for.
        """
        self._runtime = runtime
        self._timeout_s = timeout_s
        self._num_adapters = num_adapters

    def tell(self, ranks: Sequence[Rank], desired: Desired) -> Wait:
        added = desired.adapters
        if not added.adapters:
            return no_wait
        args = added, added.first_ids(self._num_adapters)
        return partial(
            self._wait,
            {rank.actor.utility.remote("sync_adapters", args, {}, self._timeout_s): rank for rank in ranks},
        )

    def _wait(self, syncing: dict[ObjectRef[dict[int, str]], Rank], deadline_s: float, is_wanted: IsWanted) -> None:
        """Wait until new ranks hold adapters. One that can't be read keeps no rank from serving."""
        waiting: list[ObjectRef[dict[int, str]]] = list(syncing)
        while waiting:
            done, waiting = self._runtime.wait(waiting, num_returns=1, timeout_s=_POLL_INTERVAL_S)
            for ref in done:
                dp_rank, text = syncing[ref].dp_rank, "dp_rank %d can't hold an adapter that was added, number %d: %s"
                with suppress(RayError):  # a rank that has failed is replaced by those who watch it
                    for lora_id, error in self._runtime.get(ref).items():
                        logger.warning(text, dp_rank, lora_id, error)
            if waiting:
                check_wanted(is_wanted)
            if waiting and self._runtime.clock.now_s() > deadline_s:
                late = sorted(syncing[ref].dp_rank for ref in waiting)
                raise InitializationError(
                    f"dp_ranks {late} haven't read their adapters within init_timeout_s={self._timeout_s:g}"
                )
