"""Compares the results of a disturbed run with those of an undisturbed one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from common import median

from chaos.workload import Result
from raycore import SamplingParams

ROUNDING = 1e-3
"""Without batch invariance, tokens whose logits are closer than this may swap. The error in float32 is far smaller."""


@dataclass
class Comparison:
    """Compares the disturbed run's results with those of the undisturbed run."""

    batch_invariant: bool
    num_results: int = 0
    lost: list[Exception] = field(default_factory=list)
    num_aborted: int = 0
    """How often a pause aborted a request, which was then submitted again."""
    num_wrongly_aborted: int = 0
    """Of them, those whose output isn't the beginning of the result. Only with batch invariance."""
    num_greedy: int = 0
    """Greedy requests whose results differ."""
    num_sampled: int = 0
    """Sampled requests whose results differ."""
    greedy_gaps: list[float] = field(default_factory=list)
    """One for each greedy result that differs: see `gap_where_they_part`. Empty with batch invariance."""

    def add(self, result: Result | Exception, reference: Result, params: SamplingParams) -> None:
        """Compare two results. Without batch invariance, only their tokens: log probabilities may differ."""
        self.num_results += 1
        if not isinstance(result, Result):
            self.lost.append(result)
            return
        self.num_aborted += len(result.aborted)
        if self.batch_invariant:
            self.num_wrongly_aborted += sum(not part.begins(reference) for part in result.aborted)
        if result == reference or (not self.batch_invariant and result.token_ids == reference.token_ids):
            return
        if params.temperature > 0:
            self.num_sampled += 1
        else:
            self.num_greedy += 1
            if not self.batch_invariant:
                self.greedy_gaps.append(gap_where_they_part(result, reference))

    def is_good(self) -> bool:
        """Whether no request was lost and no result differs by more than allowed."""
        differs = max(self.greedy_gaps, default=0.0) > ROUNDING
        if self.batch_invariant:
            differs = self.num_sampled + self.num_greedy + self.num_wrongly_aborted > 0
        return not self.lost and not differs

    def rows(self) -> list[list[object]]:
        """Rows of the report."""
        differing = f"{self.num_greedy + self.num_sampled} of {self.num_results}"
        rows: list[list[object]] = [["requests lost", len(self.lost)], ["results that differ", differing]]
        if not self.batch_invariant:
            gaps = "none"
            if self.greedy_gaps:
                gaps = f"{median(self.greedy_gaps):.1e}, {max(self.greedy_gaps):.1e}"
            rows[-1][1] = f"{differing}: {self.num_greedy} greedy, {self.num_sampled} sampled"
            rows.append(["gap of the top two logits at a greedy result's first difference: median, max", gaps])
        if self.num_aborted:
            wrong = f"{self.num_wrongly_aborted} of {self.num_aborted}"
            rows.append(["outputs of aborted requests that aren't the result's beginning", wrong])
        return rows


def gap_where_they_part(result: Result, reference: Result) -> float:
    """The undisturbed run's logit of its own token minus that of the disturbed run's token, at the first difference.

    Infinite if the disturbed run's token is not among the undisturbed run's best two.
    """
    (ours,), (theirs,), (logprobs,) = result.token_ids, reference.token_ids, reference.logprobs
    position = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    if position is None or ours[position] not in logprobs[position]:
        return math.inf
    return logprobs[position][theirs[position]].logprob - logprobs[position][ours[position]].logprob
