"""Makes the figures of a rank's batch, for the user's classes (`raycore.metrics.stat_loggers`). Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from raycore.client.output_processor import ProcessedOutputs
from raycore.client.request_state import SequenceState
from raycore.messages import LoadView
from raycore.metrics.step_stats import (
    CacheStats,
    FinishedRequestStats,
    IterationStats,
    SchedulerStats,
    SpecDecodingStats,
)


def scheduler_stats(before: LoadView, load: LoadView) -> SchedulerStats:
    """What a rank has to do, and what its caches and drafts have done between two loads."""
    external = CacheStats(
        load.external.num_queries - before.external.num_queries, _num_external(load) - _num_external(before)
    )
    return SchedulerStats(
        load.num_running,
        load.num_waiting,
        load.kv_usage,
        CacheStats(
            load.prefix_cache_queries - before.prefix_cache_queries, load.prefix_cache_hits - before.prefix_cache_hits
        ),
        external if external.queries else None,
        _drafts(before, load),
    )


def iteration_stats(
    before: LoadView, load: LoadView, step: ProcessedOutputs, gaps: Sequence[tuple[float, int]]
) -> IterationStats:
    """What a batch brought. `gaps`: seconds between two tokens of a sequence, and of how many sequences."""
    finished = step.completed()
    prompts = [each.request.prompt_token_ids for each in step.first_tokens]
    prompts += [each.request.prompt_token_ids for each in step.ended if each.request.pooled is not None]
    return IterationStats(
        num_generation_tokens=sum(num_tokens for _, num_tokens, _, _ in step.arrivals),
        num_prompt_tokens=sum(map(len, prompts)),
        num_preempted_reqs=load.num_preemptions - before.num_preemptions,
        finished_requests=[_finished(each, step.now_s) for each in step.ended],
        max_num_generation_tokens_iter=[max(len(each.token_ids) for each in one.sequences) for one in finished],
        n_params_iter=[len(each.sequences) for each in finished],
        time_to_first_tokens_iter=[
            each.first_token_s - each.request.metrics["arrival_s"]
            for each in step.first_tokens
            if each.first_token_s is not None
        ],
        inter_token_latencies_iter=[gap_s for gap_s, times in gaps for _ in range(times)],
    )


def _finished(sequence: SequenceState, now_s: float) -> FinishedRequestStats:
    request, num_output, queue_s = sequence.request, len(sequence.token_ids), sequence.queue_s or 0.0
    total_s = now_s - request.metrics["arrival_s"]
    decode_s = 0.0 if sequence.first_token_s is None else now_s - sequence.first_token_s
    return FinishedRequestStats(
        sequence.finish_reason or "",
        total_s,
        len(request.prompt_token_ids),
        num_output,
        request.params.max_tokens,
        queue_s,
        total_s - queue_s - decode_s,
        total_s - queue_s,
        decode_s,
        decode_s / (num_output - 1) if num_output > 1 else 0.0,
        sequence.num_cached_tokens or 0,
    )


def _num_external(load: LoadView) -> int:
    external = load.external
    return external.host + external.disk + external.p2p + external.external_unspecified


def _drafts(before: LoadView, load: LoadView) -> SpecDecodingStats | None:
    num_drafts = load.drafts.num_drafts - before.drafts.num_drafts
    if not num_drafts:
        return None
    positions = zip_longest(load.drafts.accepted_per_position, before.drafts.accepted_per_position, fillvalue=0)
    accepted = [now - earlier for now, earlier in positions]
    num_tokens = load.drafts.num_draft_tokens - before.drafts.num_draft_tokens
    return SpecDecodingStats(num_drafts, num_tokens, sum(accepted), accepted)
