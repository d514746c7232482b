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
        self._sent: dict[int, Counter[int]] = {}
        self._received: dict[int, Counter[int]] = {}

    def aggregate(self, outputs: Sequence[StepResult | None], output_rank: int = 0) -> StepResult:
        """Return the result of the worker `output_rank`, with the reports of all."""
        result = outputs[output_rank]
        assert result is not None, "this worker reports steps"
        reports = [(worker, each.transfer) for worker, each in enumerate(outputs) if each is not None and each.transfer]
        if reports:
            result.transfer = TransferResult(
                self._count(self._sent, [(worker, each.sent) for worker, each in reports]),
                self._count(self._received, [(worker, each.received) for worker, each in reports]),
                sorted({block for _, each in reports for block in each.failed_blocks}),
                [reply for _, each in reports for reply in each.reply],
            )
        return result

    def _count(self, counts: dict[int, Counter[int]], reported: list[tuple[int, list[int]]]) -> list[int]:
        """Count workers' reports of seq_ids, and return those that all workers have reported.

        `counts`: by seq_id, how many reports of each worker are ahead of those of others. It may report a request again
        whose blocks were kept again.
        """
        complete: list[int] = []
        for worker, seq_ids in reported:
            for seq_id in seq_ids:
                ahead = counts.setdefault(seq_id, Counter())
                ahead[worker] += 1
                if len(ahead) == self._num_workers:
                    complete.append(seq_id)
                    counts[seq_id] = ahead - Counter(dict.fromkeys(ahead, 1))
                    if not counts[seq_id]:
                        del counts[seq_id]
        return complete
