"""A worker that takes masks: it samples in a call of its own."""

from __future__ import annotations

from raycore.messages import GrammarOutput, StepPlan, StepResult
from raycore.rpc.pending import Pending
from simulation.worker import complaints
from simulation.worker.worker import Begun, SimulatedWorker

_NO_MASKS = GrammarOutput(b"", b"", b"")


class MaskedWorker(SimulatedWorker):
    """See the module. A step that isn't masked is one call, as with other workers.

    It follows no constraints, except where it drafts while a step begins: a token without a mask may be any.
    """

    _begun: Begun | None = None
    """The masked step from which nothing has been sampled yet."""

    def execute_model(self, plan: StepPlan) -> StepResult | Pending[StepResult | None] | None:
        if self._begun is not None:
            complaints.disagrees(f"{self.rank.label} gets step {plan.step} before the masks of step {self._begun.step}")
        if not plan.masked:
            return super().execute_model(plan)
        with self._complaining(plan.step):
            self._begun = self._begin(plan)
        return None

    def sample_tokens(self, grammar: GrammarOutput | None) -> StepResult | Pending[StepResult | None] | None:
        begun, self._begun = self._begun, None
        if begun is None:
            return None  # a step that isn't masked, of which this worker has nothing to report
        if grammar is None:
            complaints.disagrees(f"{self.rank.label} gets no masks for step {begun.step}")
        with self._complaining(begun.step):
            return self._end(begun, grammar)

    def _end(self, begun: Begun, grammar: GrammarOutput | None) -> StepResult | Pending[StepResult | None] | None:
        return super()._end(begun, grammar if grammar is not None or self.config.workers_draft else _NO_MASKS)
