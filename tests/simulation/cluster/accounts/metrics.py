"""Metrics add up to what callers have seen.

Counts are of sequences. A sequence that goes on elsewhere after its rank's loss, or that is computed again after a
preemption, is counted once, and so is each of its tokens. Not counted are the ends of requests that no rank had when
they were aborted or failed. Callers who leave, or whose request fails, may have missed tokens that are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from raycore.metrics import snapshot
from raycore.metrics.counts import FINISH_REASONS, RankCounts
from raycore.metrics.stat_loggers import tell_figures
from simulation.cluster import kinds
from simulation.cluster.accounts.account import Account, Run
from simulation.cluster.records import Record
from simulation.cluster.stat_loggers import UsersClasses

if TYPE_CHECKING:
    from raycore.llm import AsyncLLM

SHARE_WITH_LOGGERS = 0.25
"""Of the scenarios, those whose figures go to classes of the user's, too. That is another thread."""
_GAUGES = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
    "raycore_requests_without_rank",
)  # fmt: skip
_UNCOUNTED, _MANY = {"pieces", "pooled", "slow pieces", "ticket"}, 10_000
"""Kinds of requests that the engine sees as others than their callers, and how much these add at most."""


class Range:
    """The least and the most that a number may be."""

    def __init__(self) -> None:
        self.least = self.most = 0

    def add(self, least: int, most: int) -> None:
        self.least += least
        self.most += most

    def __contains__(self, number: int) -> bool:
        return self.least <= number <= self.most

    def __repr__(self) -> str:
        return str(self.least) if self.least == self.most else f"from {self.least} to {self.most}"


class Metrics(Account):
    """The metrics of an idle engine, and the figures that classes of the user's have got."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._users: UsersClasses | None = None

    def begin(self, llm: AsyncLLM) -> None:
        if self.run.front is not None:  # a class of the user's gets the figures of the driver's client
            return
        here = self.run.cluster.world
        if here.generator("stat loggers").random() < SHARE_WITH_LOGGERS:
            self._users = UsersClasses(here.generator("classes of stat loggers"))
            tell_figures(llm._client, self._users.factories, llm.config, len(llm.engine_infos), 0)

    def idle(self, llm: AsyncLLM) -> Iterator[str]:
        counts = list(_counts(llm))
        wanted = _wanted(self.run.recorder.records, self._calm_until_s())
        # an API server that ends takes along what it hasn't reported yet
        for name, number in _counted(counts).items() if not self.run.front or not self.run.front.num_ends else ():
            if number not in wanted[name]:
                yield f"metrics count {number} {name}, not {wanted[name]}"
        yield from self._of_preemptions(counts)
        gauges = [each for each in llm.get_metrics() if isinstance(each, snapshot.Gauge) and each.name in _GAUGES]
        for each in gauges:
            if each.value:
                yield f"the engine is idle, and {each.name}{each.labels} is {each.value:g}"
        if self._users is not None:
            yield from self._users.problems(_counted(counts))

    def _of_preemptions(self, counts: list[RankCounts]) -> Iterator[str]:
        """What is wrong with how often requests say that they were preempted. Those that were aborted say nothing."""
        run = self.run
        of_ranks = sum(each.num_preemptions for each in counts)
        of_requests = sum(each.preemptions.sum for each in counts)
        if run.scenario.faults or run.recorder.deeds or run.front is not None or self._has_cut_short:
            return
        if of_ranks != of_requests:
            yield f"ranks count {of_ranks} preemptions, and requests {of_requests:g}"

    @property
    def _has_cut_short(self) -> bool:
        """Whether a request hasn't ended by itself, or has no tokens."""
        return any(
            each.is_aborted or each.error is not None or each.request.wants.keys() & _UNCOUNTED
            for each in self.run.recorder.records
        )

    def _calm_until_s(self) -> float:
        """Until when a request that a rank has stays there."""
        return min([self.run.faults.first_s, *(deed.began_s for deed in self.run.recorder.deeds)])


def _counts(llm: AsyncLLM) -> Iterator[RankCounts]:
    """Those of all clients, without their locks: nobody waits."""
    own, clients = llm._client._requests.counts(), llm.clients
    for each in own, clients._counts_of_gone, *(client.counts() for client in clients._remote):
        yield from each.values()


def _wanted(records: list[Record], calm_until_s: float) -> dict[str, Range]:
    names = ("output tokens", "prompt tokens", "ends", "requests", *(f"ends by {each}" for each in FINISH_REASONS))
    ranges = {name: Range() for name in names}
    for record in records:
        if record.submitted_s is None or record.ended_s is None:
            continue
        request, asked = record.request, kinds.asked(record.request)
        if asked.error is not None or request.wants.keys() & _UNCOUNTED:
            for each in ranges.values():
                each.add(0, _MANY)
            continue
        num_prompt = len(asked.prompt["prompt_token_ids"])
        is_whole = record.error is None and not record.is_aborted
        is_cut = not is_whole or any(each.finish_reason == "abort" for each in record.sequences)
        # one that has tokens was on a rank; others may have waited for their constraint or adapter
        had_rank = any(each.tokens for each in record.sequences) and record.ended_s < calm_until_s
        ranges["ends"].add(request.n if had_rank or not is_cut else 0, request.n)
        # a caller may leave while its last output is on the way
        ranges["requests"].add(int(not is_cut), int(is_whole or record.is_aborted))
        for sequence in record.sequences:
            num_tokens, reason = len(sequence.tokens), sequence.finish_reason
            ranges["output tokens"].add(num_tokens, num_tokens if is_whole else request.max_tokens)
            ranges["prompt tokens"].add(num_prompt if num_tokens else 0, num_prompt if num_tokens or is_cut else 0)
            if reason is not None and reason != "abort":
                ranges[f"ends by {reason}"].add(1, 1)
            else:
                for each in FINISH_REASONS:
                    if not (is_whole and each != "abort"):
                        ranges[f"ends by {each}"].add(0, 1)
    return ranges


def _counted(counts: list[RankCounts]) -> dict[str, int]:
    ends: Counter[str] = Counter()
    for each in counts:
        ends.update(each.num_finished)
    return {
        "output tokens": sum(each.num_output_tokens for each in counts),
        "prompt tokens": sum(each.num_prompt_tokens for each in counts),
        "ends": ends.total(),
        "requests": sum(each.n.count for each in counts),
        **{f"ends by {reason}": number for reason, number in ends.items()},
    }
