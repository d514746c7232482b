"""Counts what a client's requests do on each rank, for metrics. Not thread-safe. Does not depend on Ray.

The numbers of running and waiting requests are not counted here: ranks report them in `raycore.messages.LoadView`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import zip_longest

from raycore.client.inter_token_latency import InterTokenLatency
from raycore.client.output_processor import ProcessedOutputs
from raycore.client.request_state import RequestState, SequenceState
from raycore.client.step_stats import iteration_stats, scheduler_stats
from raycore.messages import LoadView
from raycore.metrics.counts import RankCounts
from raycore.metrics.step_stats import IterationStats, SchedulerStats
from raycore.outputs import RequestOutput

Told = Callable[[int, SchedulerStats, IterationStats], object]
"""Takes a dp_rank and what a batch of it brought. Called with the client's lock, so it must return quickly."""


class Recorder:
    """One client's counts for each rank."""

    def __init__(self, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._ranks: dict[int, RankCounts] = {}
        self._gaps = InterTokenLatency()
        self.told: Told | None = None
        """Gets the figures of each batch. None: nobody wants them."""

    def add_rank(self, dp_rank: int) -> None:
        """Start counting for this rank. Continues with the rank's existing counts if there are any."""
        if dp_rank not in self._ranks:
            self._ranks[dp_rank] = RankCounts.empty(self._max_model_len)

    def counts(self) -> dict[int, RankCounts]:
        """Copies of the current counts, by dp_rank, including ranks that are gone."""
        return {dp_rank: counts.copy() for dp_rank, counts in sorted(self._ranks.items())}

    def num_tokens(self) -> int:
        """Number of prompt and output tokens of all ranks. A cheap way to see whether the counts have changed."""
        return sum(counts.num_prompt_tokens + counts.num_output_tokens for counts in self._ranks.values())

    def take(self, dp_rank: int, before: LoadView, load: LoadView, step: ProcessedOutputs) -> None:
        """Add the contents of a rank's batch to the counts.

        Args:
            before: the load in the previous batch from the same process of the rank; `NO_LOAD` for its first batch.
            load: the load in this batch.
            step: the result of processing this batch.
        """
        counts = self._ranks[dp_rank]
        prompts = _prompt_tokens(step.first_tokens)
        num_pooled = sum(len(each.request.prompt_token_ids) for each in step.ended if each.request.pooled is not None)
        if num_pooled:
            counts.step_tokens.observe(num_pooled)
        gaps: list[tuple[float, int]] = []
        for seq_ids, num_tokens, made_s, _ in step.arrivals:
            counts.num_output_tokens += num_tokens
            counts.step_tokens.observe(num_tokens + prompts[made_s])
            gaps += self._gaps.observe(dp_rank, seq_ids, made_s)
        for gap_s, times in gaps:
            counts.between_tokens_s.observe(gap_s, times)
        _count_load(counts, before, load)
        for sequence in step.first_tokens:
            _count_first_token(counts, sequence)
        if step.ended:
            self._gaps.forget([sequence.seq_id for sequence in step.ended])
        for sequence in step.ended:
            _count_end(counts, sequence, step.now_s)
        for request in step.completed():
            _count_request(counts, request)
        if self.told is not None:
            self.told(dp_rank, scheduler_stats(before, load), iteration_stats(before, load, step, gaps))

    def count_images(self, dp_rank: int, num_lookups: int, num_hits: int) -> None:
        """Count images that this client has looked up among those that it keeps, as this rank's."""
        counts = self._ranks[dp_rank]
        counts.num_image_lookups += num_lookups
        counts.num_image_hits += num_hits

    def drop(self, dp_rank: int | None, seq_ids: list[int], output: RequestOutput, reason: str) -> None:
        """Count the unfinished sequences of a request that was aborted or that failed.

        Args:
            dp_rank: the rank that had the request. None if no rank had it: nothing is counted then.
            seq_ids: the ids of all sequences of the request.
            output: the request's last output. Only sequences with the finish reason `abort` in it are counted, because
                the others were counted when they finished.
            reason: the finish reason under which the sequences are counted.
        """
        self._gaps.forget(seq_ids)
        if dp_rank is not None:
            num_cut_short = sum(completion.finish_reason == "abort" for completion in output.outputs)
            self._ranks[dp_rank].num_finished[reason] += num_cut_short

    def rebind(self, seq_id: int, new_seq_id: int) -> None:
        """Note that a sequence continues on another rank, under another seq_id."""
        self._gaps.rebind(seq_id, new_seq_id)


def _count_load(counts: RankCounts, before: LoadView, load: LoadView) -> None:
    """Add what a rank has counted between two loads."""
    counts.num_preemptions += load.num_preemptions - before.num_preemptions
    counts.num_prefix_queries += load.prefix_cache_queries - before.prefix_cache_queries
    counts.num_prefix_hits += load.prefix_cache_hits - before.prefix_cache_hits
    if load.external != before.external:
        counts.num_external_queries += load.external.num_queries - before.external.num_queries
        counts.num_host_hits += load.external.host - before.external.host
        counts.num_disk_hits += load.external.disk - before.external.disk
        counts.num_p2p_hits += load.external.p2p - before.external.p2p
        counts.num_unspecified_hits += load.external.external_unspecified - before.external.external_unspecified
    counts.num_drafts += load.drafts.num_drafts - before.drafts.num_drafts
    counts.num_draft_tokens += load.drafts.num_draft_tokens - before.drafts.num_draft_tokens
    if load.drafts.accepted_per_position != before.drafts.accepted_per_position:
        now, earlier = load.drafts.accepted_per_position, before.drafts.accepted_per_position
        totals = zip_longest(counts.num_accepted_per_position, now, earlier, fillvalue=0)
        counts.num_accepted_per_position = [counted + new - old for counted, new, old in totals]


def _prompt_tokens(first_tokens: list[SequenceState]) -> Counter[float | None]:
    """For each time at which sequences got their first token: the number of prompt tokens of these sequences."""
    prompts: Counter[float | None] = Counter()
    for sequence in first_tokens:
        prompts[sequence.first_token_s] += len(sequence.request.prompt_token_ids)
    return prompts


def _count_first_token(counts: RankCounts, sequence: SequenceState) -> None:
    assert sequence.first_token_s is not None
    request = sequence.request
    counts.num_prompt_tokens += len(request.prompt_token_ids)
    counts.num_cached_prompt_tokens += sequence.num_cached_tokens or 0
    counts.num_external_prompt_tokens += sequence.num_external_tokens
    counts.first_token_s.observe(sequence.first_token_s - request.metrics["arrival_s"])


def _count_end(counts: RankCounts, sequence: SequenceState, now_s: float) -> None:
    assert sequence.finish_reason is not None
    counts.num_finished[sequence.finish_reason] += 1
    if sequence.request.pooled is not None:
        _count_pooled(counts, sequence, now_s)
    if sequence.finish_reason == "error" or sequence.first_token_s is None:
        return
    request = sequence.request
    num_prompt, num_output = len(request.prompt_token_ids), len(sequence.token_ids)
    total_s, queue_s = now_s - request.metrics["arrival_s"], sequence.queue_s or 0.0
    decode_s = now_s - sequence.first_token_s
    counts.request_s.observe(total_s)
    counts.queue_s.observe(queue_s)
    counts.inference_s.observe(total_s - queue_s)
    counts.prefill_s.observe(total_s - queue_s - decode_s)
    counts.decode_s.observe(decode_s)
    counts.per_output_token_s.observe(decode_s / (num_output - 1) if num_output > 1 else 0.0)
    counts.prompt_tokens.observe(num_prompt)
    counts.computed_prompt_tokens.observe(num_prompt - (sequence.num_cached_tokens or 0))
    counts.output_tokens.observe(num_output)
    counts.preemptions.observe(sequence.num_preemptions)
    if request.params.max_tokens is not None:
        counts.max_tokens.observe(request.params.max_tokens)


def _count_pooled(counts: RankCounts, sequence: SequenceState, now_s: float) -> None:
    """Count a request that has its result. It has no output tokens."""
    request, num_cached = sequence.request, sequence.num_cached_tokens or 0
    num_prompt = len(request.prompt_token_ids)
    total_s, queue_s = now_s - request.metrics["arrival_s"], sequence.queue_s or 0.0
    counts.num_prompt_tokens += num_prompt
    counts.num_cached_prompt_tokens += num_cached
    counts.num_external_prompt_tokens += sequence.num_external_tokens
    counts.request_s.observe(total_s)
    counts.queue_s.observe(queue_s)
    counts.inference_s.observe(total_s - queue_s)
    counts.prefill_s.observe(total_s - queue_s)
    counts.prompt_tokens.observe(num_prompt)
    counts.computed_prompt_tokens.observe(num_prompt - num_cached)


def _count_request(counts: RankCounts, request: RequestState) -> None:
    counts.n.observe(len(request.sequences))
    counts.longest_output_tokens.observe(max(len(sequence.token_ids) for sequence in request.sequences))
