"""Masked steps: workers compute the logits, and meanwhile the engine makes the masks of the tokens that may come."""

from __future__ import annotations

from typing import Protocol

from raycore.executor.base import Executor
from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.rpc.pending import Pending, PendingCall
from raycore.system import ThreadPoolExecutor


class StepMasks(Protocol):
    """Makes masks for the steps that are planned as masked."""

    def is_due(self, step: int) -> bool:
        """Whether all tokens have arrived that a step's masks follow."""
        ...

    def make(self, step: int) -> GrammarOutput:
        """Make a step's masks. May run on another thread than the engine's, which then changes nothing."""
        ...


class MaskedSteps:
    """The masked steps of an engine.

    Workers sample a step before they compute the next one. So if a step's masks follow a token that is still to come,
    no other step begins before that has arrived.
    """

    def __init__(self, executor: Executor, masks: StepMasks | None) -> None:
        """`masks`: None: no step is planned as masked."""
        self._executor = executor
        self._masks = masks
        self._thread: ThreadPoolExecutor | None = None
        self._deferred: DeferredStep | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether a step waits for tokens of steps before it."""
        return self._deferred is not None

    def execute(self, plan: StepPlan) -> Pending[StepResult]:
        """Start a step, and send its masks if they can be made."""
        assert self._masks is not None
        if not self._masks.is_due(plan.step):
            self._deferred = DeferredStep(plan.step, self._executor.execute(plan))
            return self._deferred
        # a worker in this process computes in this thread
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="raycore-masks")
        making = self._thread.submit(self._masks.make, plan.step)
        step = self._executor.execute(plan)
        return self._executor.sample_tokens(step, making.result())

    def go_on(self) -> None:
        """Send the masks of the deferred step, if they can be made by now."""
        deferred = self._deferred
        if deferred is None:
            return
        assert self._masks is not None
        if self._masks.is_due(deferred.step):
            self._deferred = None
            deferred.pending = self._executor.sample_tokens(deferred.pending, self._masks.make(deferred.step))


class DeferredStep:
    """A step in flight whose masks are still to come. Implements `Pending`."""

    def __init__(self, step: int, pending: PendingCall[StepResult]) -> None:
        self.step = step
        self.pending = pending

    def done(self) -> bool:
        return self.pending.done()

    def result(self, timeout: float | None = None) -> StepResult:
        return self.pending.result(timeout)
