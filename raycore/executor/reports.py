"""Makes one result of a step of those of all workers, with what their parts report."""

from __future__ import annotations

from collections.abc import Sequence

from raycore.messages import StepResult


class ReportsOfAll:
    """Has workers report that would have no result of a step, such as those of a pipeline's first stages.

    Implements `OutputAggregator`.
    """

    def aggregate(self, outputs: Sequence[StepResult | None], output_rank: int = 0) -> StepResult:
        """Return the result of the worker `output_rank`, with the reports of all in the order of their ranks."""
        result = outputs[output_rank]
        assert result is not None, "this worker reports steps"
        result.reports = [report for each in outputs if each is not None for report in each.reports]
        return result
