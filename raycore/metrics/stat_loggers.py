"""Classes of the user's that get an engine's figures, with vLLM's interface: `from_engine_args(stat_loggers=[...])`.

An engine tells what each of a rank's batches brought. A thread of its own calls the user's objects, so that they hold
up no request.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from raycore.errors import InvalidConfig
from raycore.json_fields import shortened
from raycore.metrics.step_stats import IterationStats, SchedulerStats
from raycore.recurring import Recurring
from raycore.system import Empty, Full, Queue, threading

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_MAX_CALLS = 10_000
"""How many batches may wait for slow objects: seconds of a busy engine, and some megabytes."""


class StatLoggerBase(ABC):
    """Base of the classes of a user that get figures: an object for each data-parallel rank.

    ::

        class Throughput(StatLoggerBase):
            def __init__(self, vllm_config, engine_index=0): ...
            def record(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0): ...
            def log_engine_initialized(self): ...

        engine = AsyncLLM.from_engine_args(args, stat_loggers=[Throughput])
    """

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """Take the engine's configuration and the rank's number."""

    @abstractmethod
    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take what a batch of the rank brought. Called on a thread of its own, which waits for it."""

    @abstractmethod
    def log_engine_initialized(self) -> None:
        """Take note that the engine has started."""

    def log(self) -> None:  # noqa: B027  # it may stay as it is
        """Log what was recorded. `do_log_stats()` has it called, by the thread that calls `record()`."""


class AggregateStatLoggerBase(StatLoggerBase):
    """The same with one object for all ranks, which gets `engine_indexes`, the numbers of the ranks."""

    @abstractmethod
    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        """Take the engine's configuration and the numbers of the ranks at its start."""


StatLoggerFactory = Callable[[Any, int], StatLoggerBase]
"""A class, or a function that makes an object from the configuration and a rank's number."""


def check_stat_loggers(factories: Sequence[object]) -> None:
    """Raise InvalidConfig if one of them makes no objects."""
    for each in factories:
        if not callable(each):
            raise InvalidConfig(f"stat_loggers has {shortened(each)}: give classes, such as those of a StatLoggerBase")


class Client(Protocol):
    """What has an engine's figures."""

    @property
    def failure(self) -> BaseException | None: ...

    def tell_figures(self, told: Callable[[int, SchedulerStats, IterationStats], None]) -> None: ...


def tell_figures(
    client: Client, factories: Sequence[object], config: Any, num_ranks: int, first_rank: int
) -> StatLoggers:
    """Have a client's figures told to objects of the user's until the client has failed: see `StatLoggers`."""
    loggers = StatLoggers(factories, config, num_ranks, first_rank)
    loggers.start(lambda: client.failure is not None)
    client.tell_figures(loggers.put)
    return loggers


class StatLoggers:
    """Passes figures on to the user's objects, on a thread of its own."""

    def __init__(self, factories: Sequence[object], config: Any, num_ranks: int, first_rank: int = 0) -> None:
        """Make the objects. `first_rank`: the number that they get for rank 0. Raises what they raise."""
        self._first_rank = first_rank
        self._config = config
        self._calls: Queue[Callable[[], None]] = Queue(_MAX_CALLS)
        self._failures, self._losses = Recurring(), Recurring()
        given: Sequence[Any] = factories
        dp_ranks = list(range(first_rank, first_rank + num_ranks))
        self._shared = [each(config, dp_ranks) for each in given if _is_aggregate(each)]
        self._factories = [each for each in given if not _is_aggregate(each)]
        self._of_ranks = {dp_rank: [each(config, dp_rank) for each in self._factories] for dp_rank in dp_ranks}

    def start(self, has_ended: Callable[[], bool]) -> None:
        """Tell the objects that the engine has started, and pass figures on until `has_ended()` and none are left."""
        self._call_all("log_engine_initialized")
        threading.Thread(target=self._run, args=(has_ended,), name="raycore-stat-loggers", daemon=True).start()

    def put(self, dp_rank: int, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        """Pass these figures on. Doesn't wait."""
        self._soon(partial(self._record, self._first_rank + dp_rank, scheduler, iteration))

    def log(self) -> None:
        """Have all objects log what they have, after the figures that came before. Doesn't wait."""
        self._soon(partial(self._call_all, "log"))

    def _soon(self, call: Callable[[], None]) -> None:
        """Have the thread make this call. The oldest one is dropped if too many wait."""
        while True:
            try:
                self._calls.put_nowait(call)
                return
            except Full:
                with suppress(Empty):  # the thread may have taken it
                    self._calls.get_nowait()
                if self._losses.is_due():
                    logger.warning(
                        "stat_loggers are slower than the engine: of more than %d batches, the oldest are dropped. "
                        "Let record() return sooner",
                        _MAX_CALLS,
                    )

    def _run(self, has_ended: Callable[[], bool]) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_POLL_S)
            except Empty:
                if has_ended():
                    return
                continue
            call()

    def _record(self, dp_rank: int, scheduler: SchedulerStats, iteration: IterationStats) -> None:
        others = {"mm_cache_stats": None, "engine_idx": dp_rank}
        for each in (*self._shared, *self._of_rank(dp_rank)):
            self._call(each, "record", scheduler, iteration, **others)

    def _of_rank(self, dp_rank: int) -> list[Any]:
        """The objects of a rank. One that the engine got later gets its own then, but none that can't be made."""
        if dp_rank not in self._of_ranks:
            made: list[Any] = []
            self._of_ranks[dp_rank] = made
            for factory in self._factories:
                try:
                    made.append(factory(self._config, dp_rank))
                except Exception:  # the user's code: the other objects want their figures
                    logger.exception("stat_loggers: %s has made no object for rank %d", shortened(factory), dp_rank)
        return self._of_ranks[dp_rank]

    def _call_all(self, method: str) -> None:
        for each in (*self._shared, *(each for of_rank in self._of_ranks.values() for each in of_rank)):
            self._call(each, method)

    def _call(self, target: Any, method: str, *figures: object, **others: object) -> None:
        try:
            # classes for older versions of vLLM lack the methods that get no figures
            call = getattr(target, method) if figures else getattr(target, method, None)
            if call is not None:
                call(*figures, **_taken(call, others))
        except Exception as error:  # the user's code: the figures that follow may be fine, and others want them
            if self._failures.is_due((type(target).__name__, method, type(error))):  # its text may be another each time
                logger.exception("%s.%s() failed", type(target).__name__, method)


def _is_aggregate(factory: object) -> bool:
    return isinstance(factory, type) and issubclass(factory, AggregateStatLoggerBase)


def _taken(call: Callable[..., Any], others: dict[str, object]) -> dict[str, object]:
    """Those keywords that a method takes: methods for older versions of vLLM take fewer."""
    parameters = inspect.signature(call).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return others
    return {name: value for name, value in others.items() if name in parameters}
