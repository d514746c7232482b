"""The contract between a rank's engine and what adds to it: grammars, adapters, features, drafts, events, a connector.

A part overrides some of the hooks of `EnginePart`, whose own methods do nothing. The engine calls them at fixed
moments, in the order of its parts (`engine/parts.py`). What adds to the planning of steps is a `SchedulerPart`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from raycore.hooks import overridden

if TYPE_CHECKING:
    from raycore.activity import Activity
    from raycore.config import EngineConfig
    from raycore.engine.progress import LoopProgress
    from raycore.engine.rank_memory import RankMemory
    from raycore.executor.base import Executor
    from raycore.kvcache.cache_log import CacheLog
    from raycore.messages import EngineRequest, StepPlan, WeightVersion
    from raycore.scheduler.outputs import StepOutputs
    from raycore.scheduler.protocol import SchedulerProtocol
    from raycore.worker.rank import Regrouping


class PartedEngine(Protocol):
    """An engine, as its parts know it: see `EngineCore`."""

    config: EngineConfig
    executor: Executor
    scheduler: SchedulerProtocol
    memory: RankMemory
    progress: LoopProgress
    version: WeightVersion


class Prepared(NamedTuple):
    """Requests that a part no longer keeps back."""

    seq_ids: Sequence[int] = ()
    """Those that may start, if no other part keeps them back."""
    failed: Sequence[tuple[int, str]] = ()
    """(seq_id, reason) of those that can't start."""


class EnginePart:
    """What a capability adds to the engine of one rank. Its hooks are called on the engine's thread."""

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return what clients may call between two steps, by name. The signatures say how arguments are converted.

        A name that the engine has already, or a part before this one, gets another function.
        """
        return {}

    # ---- requests

    def complete(self, request: EngineRequest) -> list[str]:
        """Add the data of features that the client hasn't sent, because the rank should have it.

        Returns: the identifiers of features whose data is missing. If there are any, the request isn't added.
        """
        return []

    def must_wait(self, request: EngineRequest) -> bool:
        """Whether a new request has to be kept back until this part is ready for it.

        Raises:
            InvalidRequest: it can't run.
        """
        return False

    def added(self, request: EngineRequest) -> None:
        """Note that a request was added. Begin to prepare what it waits for."""

    def dropped(self, seq_id: int) -> None:
        """Note that a request has ended. It may be unknown here."""

    def take_prepared(self) -> Prepared:
        """Return the requests that this part keeps back no longer. Called before each step."""
        return Prepared()

    def keeps_back(self, seq_id: int) -> bool:
        """Whether a request waits for this part."""
        return False

    def is_preparing(self) -> bool:
        """Whether `take_prepared` should be called again soon."""
        return False

    # ---- steps

    def step_planned(self, plan: StepPlan, planned_s: float) -> None:
        """Note a plan, before the workers get it. `planned_s`: when it was begun, on the monotonic clock."""

    def step_done(self, plan: StepPlan, outputs: StepOutputs) -> None:
        """Note a step's outputs, and add to them."""

    def between_steps(self) -> None:
        """Called after each step, and when there is none."""

    def pause_s(self) -> float:
        """Return how long the loop may sleep before the next step, although there is work for it and none in flight."""
        return 0.0

    def idle(self) -> None:
        """Note that there is nothing to do."""

    # ---- the rest

    def load(self) -> dict[str, Any]:
        """Return fields of `LoadView`. Called after each step."""
        return {}

    def sleep(self, *, drops: bool) -> None:
        """Note that the workers' weights are about to fall asleep. `drops`: whether they are dropped."""

    def wake(self, timeout_s: float) -> None:
        """Note that the weights are awake. What takes longer than `timeout_s` raises."""

    def changing(self, before: Activity, after: Activity) -> AbstractContextManager[object]:
        """Return what is around a change of the rank's activity, in which memory goes and returns."""
        return nullcontext()

    def regroup(self, regrouping: Regrouping, *, stays: bool) -> None:
        """Join another group of ranks that share experts: see `EngineCore.regroup`. The configuration is its own."""

    def addresses(self) -> Sequence[str]:
        """Return how workers of other ranks reach those of this one, to read blocks."""
        return ()

    def cache_logs(self) -> Sequence[CacheLog]:
        """Return what clients are told of the prefix cache."""
        return ()

    def close(self) -> None:
        """Free what the part holds. Idempotent."""


class EngineHooks:
    """The hooks that parts override, in the order of the parts. Empty: no part needs it."""

    def __init__(self, parts: Sequence[EnginePart]) -> None:
        self.complete = overridden(parts, EnginePart.complete)
        self.must_wait = overridden(parts, EnginePart.must_wait)
        self.added = overridden(parts, EnginePart.added)
        self.dropped = overridden(parts, EnginePart.dropped)
        self.take_prepared = overridden(parts, EnginePart.take_prepared)
        self.keeps_back = overridden(parts, EnginePart.keeps_back)
        self.is_preparing = overridden(parts, EnginePart.is_preparing)
        self.step_planned = overridden(parts, EnginePart.step_planned)
        self.step_done = overridden(parts, EnginePart.step_done)
        self.between_steps = overridden(parts, EnginePart.between_steps)
        self.pause_s = overridden(parts, EnginePart.pause_s)
        self.idle = overridden(parts, EnginePart.idle)
        self.load = overridden(parts, EnginePart.load)
        self.sleep = overridden(parts, EnginePart.sleep)
        self.changing = overridden(parts, EnginePart.changing)
        self.regroup = overridden(parts, EnginePart.regroup)
        self.wake = overridden(parts, EnginePart.wake)
