"""Steps on a worker, which may sample in a call of its own: see `WorkerProtocol.sample_tokens`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.rpc.pending import Pending

StepReturn = StepResult | Pending[StepResult | None] | None
"""What a worker returns of a step."""


class WorkerSteps:
    """Runs steps on one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._plan: StepPlan | None = None
        """Of the masked step that hasn't sampled yet."""
        self._result: StepReturn = None
        """What the worker has returned of that step, if it has computed it."""

    @property
    def is_masked(self) -> bool:
        """Whether the last step waits for its masks."""
        return self._plan is not None

    def execute(self, plan: StepPlan) -> StepReturn:
        """Run a step, or what of a masked step comes before its masks: then `sample` has the result."""
        if plan.masked:
            self._plan, self._result = None, None
            if samples_apart(self._worker):
                self._result = self._worker.execute_model(plan)
            self._plan = plan
            return None
        result = self._worker.execute_model(plan)
        if result is None and samples_apart(self._worker):
            return self._worker.sample_tokens(None)
        return result

    def sample(self, grammar: GrammarOutput) -> StepReturn:
        """Run the rest of the last step, which waits for its masks."""
        plan, result = self._plan, self._result
        self._plan = self._result = None
        assert plan is not None
        if not samples_apart(self._worker):
            return self._worker.execute_model(replace(plan, masked=False, grammar=grammar))
        return self._worker.sample_tokens(grammar) if result is None else result


def takes_masks(worker: object) -> bool:
    """Whether a worker can be given masks. Otherwise it follows grammars itself."""
    return hasattr(worker, "sample_tokens")


def samples_apart(worker: object) -> bool:
    """Whether a worker samples in `sample_tokens`, after `execute_model` has returned None.

    A subclass that has an `execute_model` of its own, but no `sample_tokens`, samples in the former.
    """
    return "execute_model" not in vars(worker) and _class_samples_apart(type(worker))


def _class_samples_apart(worker_class: type) -> bool:
    for each in worker_class.__mro__:
        if "sample_tokens" in vars(each):
            return True
        if "execute_model" in vars(each):
            return False
    return False
