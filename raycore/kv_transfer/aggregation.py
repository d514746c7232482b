"""Makes one report of those of all workers of a rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from raycore.messages import StepResult, TransferResult


class TransferAggregator:
    """Adds up what workers report. Implements `OutputAggregator`.

    A request counts as sent, or as received, when all workers have reported it, in whichever steps.
    """

    def __init__(self, num_workers: int) -> None:
        """`num_workers`: how many must report a request."""
        self._num_workers = num_workers
        self._sent: Counter[int] = Counter()
        self._received: Counter[int] = Counter()

    def aggregate(self, outputs: Sequence[StepResult | None], output_rank: int = 0) -> StepResult:
        """Return the result of the worker `output_rank`, with the reports of all."""
        result = outputs[output_rank]
        assert result is not None, "this worker reports steps"
        reports = [each.transfer for each in outputs if each is not None and each.transfer is not None]
        if reports:
            result.transfer = TransferResult(
                self._count(self._sent, [each.sent for each in reports]),
                self._count(self._received, [each.received for each in reports]),
                sorted({block for each in reports for block in each.failed_blocks}),
                [reply for each in reports for reply in each.reply],
            )
        return result

    def _count(self, counts: Counter[int], reported: list[list[int]]) -> list[int]:
        """Count reports of seq_ids, and return those that all workers have reported."""
        complete: list[int] = []
        for seq_ids in reported:
            for seq_id in seq_ids:
                counts[seq_id] += 1
                if counts[seq_id] == self._num_workers:
                    del counts[seq_id]
                    complete.append(seq_id)
        return complete
