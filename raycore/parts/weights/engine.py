"""Which weights a rank's workers have, and by which identity what they compute is known.

Each change of weights ends here, whoever makes it: an update, a checkpoint that is read, a sleep that drops weights, or
a method of workers that a client calls. No step runs meanwhile, so what was computed before and what is computed
afterwards never have the same identity.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

from raycore.activity import Activity
from raycore.engine.utilities import num_changes
from raycore.errors import RaycoreError
from raycore.executor.base import Executor
from raycore.messages import FIRST_WEIGHTS, WeightVersion
from raycore.parts.transfers.connectors.identity import Identity
from raycore.scheduler.protocol import SchedulerProtocol


class RankWeights:
    """See the module. All methods are called on the engine's thread."""

    def __init__(self, executor: Executor, scheduler: SchedulerProtocol, identity: Identity) -> None:
        """`identity`: of the weights with which the workers have started."""
        self.version = FIRST_WEIGHTS
        """What outputs say."""
        self._executor = executor
        self._scheduler = scheduler
        self._identity = identity
        self._counts: list[int] | None = None
        """How often each worker's weights had changed, when that was known last. None: since then, they have."""
        self._scheduler.take_identity(identity.digest)

    def take(self, number: int, name: str, is_new: bool, key: str = "") -> None:
        """Note which weights the workers have, whose outputs say so from now on.

        Args:
            number: see `WeightVersion`, as for `name`.
            is_new: whether the weights have changed, so that nothing that was computed with the old ones may be used.
                Requests that have some of it are computed again. No step may be in flight.
            key: how all ranks of the engine know weights that came from no checkpoint. Empty: they came from one.
        """
        if is_new:
            if key:
                self._identity.adopt(key)
            self._forget_computed()
        self.version = WeightVersion(number, name)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the workers for a client. It may change weights, such as `load_weights`."""
        with self._watching():
            return self._executor.collective_rpc(method, timeout, args, kwargs)

    def during(self, method: object, args: Sequence[Any]) -> AbstractContextManager[Callable[[list[int]], None] | None]:
        """Note what a method of updates does to the weights. Yields what may be called with the counts after it."""
        return self._reading(args[0]) if method == "reload_from" else self._watching()

    def between(self, before: Activity, after: Activity) -> AbstractContextManager[object]:
        """Note what a change of the rank's activity does to the weights."""
        if before.sleep_level < 2 or "weights" not in after.waking_from(before):
            return nullcontext()
        return self._reading(None) if after.reads_weights else self._watching()

    @contextmanager
    def _watching(self) -> Generator[Callable[[list[int]], None], None, None]:
        if self._counts is None:
            self._counts = self._num_changes()
        told: list[list[int]] = []
        try:
            yield told.append
        finally:
            if not told:
                with suppress(RaycoreError):  # a worker that has failed may have changed anything
                    told.append(self._num_changes())
            counts = told[0] if told else None
            if counts is None or counts != self._counts:
                self._counts = counts
                self._identity.lose()
                self._forget_computed()

    @contextmanager
    def _reading(self, path: str | None) -> Generator[None, None, None]:
        self._counts = None
        try:
            with self._identity.reading(path):
                yield
        finally:
            self._forget_computed()

    def _forget_computed(self) -> None:
        """Have requests that run computed again. Else they would go on to store, as of the weights before, what others
        have computed."""
        self._scheduler.reset_prefix_cache(reset_running_requests=True)
        self._scheduler.take_identity(self._identity.digest)

    def _num_changes(self) -> list[int]:
        return self._executor.collective_rpc(num_changes)
