"""Which weights a rank's workers have, and by which identity what they compute is known.

Each change of weights ends here, whoever makes it: an update, a checkpoint that is read, a sleep that drops weights, or
a method of workers that a client calls. No step runs meanwhile, so what was computed before and what is computed
afterwards never have the same identity.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, cast

from raycore.activity import Activity
from raycore.engine.part import EnginePart, PartedEngine
from raycore.errors import InvalidInput, RaycoreError, WorkerFailed
from raycore.messages import WeightVersion
from raycore.parts.transfers.connectors.identity import Identity


class RankWeights(EnginePart):
    """See the module. All methods are called on the engine's thread."""

    def __init__(self, engine: PartedEngine, identity: Identity) -> None:
        """`identity`: of the weights with which the workers have started."""
        self._engine = engine
        self._executor = engine.executor
        self._scheduler = engine.scheduler
        self._identity = identity
        self._counts: list[int] | None = None
        """How often each worker's weights had changed, when that was known last. None: since then, they have."""
        self._scheduler.take_identity(identity.digest)

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return what may change weights, and what says that they have changed."""
        return {
            "collective_rpc": self._collective_rpc,
            "take_weights": self._take,
            "update_weights": self._update,
        }

    def _take(self, number: int, name: str, is_new: bool, key: str = "") -> None:
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
        self._engine.version = WeightVersion(number, name)

    def _collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the workers for a client. It may change weights, such as `load_weights`."""
        with self._watching():
            return self._executor.collective_rpc(method, timeout, args, kwargs)

    def _update(self, method: Any, args: tuple[Any, ...] = (), timeout: float | None = None) -> list[Any]:
        """Call a method of the workers that changes their weights.

        Args:
            args: a list is one argument for each worker.

        Raises:
            InvalidInput: all workers found an argument invalid, so none has changed anything.
            WorkerFailed: a worker failed, or only some found an argument invalid. What weights they have isn't known.
        """
        timeout_s = timeout or self._engine.config.executor.init_timeout_s
        around = self._reading(args[0]) if method == "reload_from" else self._watching()
        with self._engine.progress.long_work(), around as tell:
            answers: list[_Answer] = self._executor.collective_rpc(_attempted, timeout_s, (method, args))
            tell([answer.num_changes for answer in answers])
            refused = [(index, answer.refusal) for index, answer in enumerate(answers) if answer.refusal is not None]
            if not refused:
                return [answer.result for answer in answers]
            index, refusal = refused[0]
            if len(refused) == len(answers):
                raise refusal
            raise WorkerFailed(index, f"{type(refusal).__name__}: {refusal}", "the other workers have followed")

    def changing(self, before: Activity, after: Activity) -> AbstractContextManager[object]:
        """Note what a change of the rank's activity does to the weights."""
        if before.sleep_level < 2 or "weights" not in after.waking_from(before):
            return nullcontext()
        return self._reading(None) if after.reads_weights else self._watching()

    @contextmanager
    def _watching(self) -> Generator[Callable[[list[int]], object], None, None]:
        """Weights may change within this. It asks for the counts afterwards, unless it was told them."""
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
    def _reading(self, path: str | None) -> Generator[Callable[[list[int]], object], None, None]:
        """Weights are read within this, whatever the counts are that it is told."""
        self._counts = None
        try:
            with self._identity.reading(path):
                yield lambda counts: None
        finally:
            self._forget_computed()

    def _forget_computed(self) -> None:
        """Have requests that run computed again. Else they would go on to store, as of the weights before, what others
        have computed."""
        self._scheduler.reset_prefix_cache(reset_running_requests=True)
        self._scheduler.take_identity(self._identity.digest)

    def _num_changes(self) -> list[int]:
        return self._executor.collective_rpc(num_changes)


class _Answer(NamedTuple):
    """What a worker's method has returned, or why it found an argument invalid."""

    num_changes: int
    """As `num_weight_changes`."""
    result: Any = None
    refusal: InvalidInput | None = None


def _attempted(worker: Any, method: str, args: Sequence[Any]) -> _Answer:
    """Call a worker's method. If the only argument is a list, it has one for each worker of the rank."""
    if len(args) == 1 and isinstance(args[0], list):
        args = (cast("list[Any]", args[0])[worker.rank.worker],)
    try:
        result = getattr(worker, method)(*args)
    except InvalidInput as error:
        return _Answer(num_changes(worker), refusal=error.with_traceback(None))
    return _Answer(num_changes(worker), result)


def num_changes(worker: Any) -> int:
    """How often a worker's weights have changed."""
    return getattr(worker, "num_weight_changes", 0)
