"""The names of all metrics, their help texts, and the fields that hold their numbers.

Metrics whose names begin with `vllm:` have vLLM's names and meanings. Counters are named without the `_total` that
Prometheus adds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from raycore.metrics.counts import RankCounts
from raycore.metrics.view import MetricsView
from raycore.status import UP_STATES, RankStatus

GAUGES: tuple[tuple[str, str, Callable[[RankStatus], float]], ...] = (
    ("vllm:num_requests_running", "Running requests.", lambda rank: rank.num_running),
    ("vllm:num_requests_waiting", "Waiting requests.", lambda rank: rank.num_waiting),
    ("vllm:kv_cache_usage_perc", "Fraction of the KV cache in use, 0 to 1.", lambda rank: rank.kv_usage),
    ("raycore_rank_serving", "1 while the rank runs requests.", lambda rank: rank.state == "serving"),
    (
        "raycore_rank_stale",
        "1 while the rank is out of service, because it has no weights that it may serve with.",
        lambda rank: rank.state == "stale",
    ),
    (
        "raycore_rank_unplaced",
        "1 while the rank, which was lost, waits because no node has room for it.",
        lambda rank: rank.state == "unplaced",
    ),
)

LABELLED_GAUGES: tuple[tuple[str, str, str, dict[str, Callable[[RankStatus], float]]], ...] = (
    (
        "vllm:engine_sleep_state",
        "Whether the rank is up and awake, asleep at level 1 (weights_offloaded), or asleep at level 2 (discard_all).",
        "sleep_state",
        {
            "awake": lambda rank: rank.state in UP_STATES and rank.sleep_level == 0,
            "weights_offloaded": lambda rank: rank.sleep_level == 1,
            "discard_all": lambda rank: rank.sleep_level == 2,
        },
    ),
    (
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests: for a slot or blocks (capacity), or for a grammar, an adapter, or keys and values from "
        "elsewhere (deferred).",
        "reason",
        {
            "capacity": lambda rank: rank.num_waiting - rank.num_deferred,
            "deferred": lambda rank: rank.num_deferred,
        },
    ),
    (
        "vllm:num_requests_kv_fetch_by_stage",
        "Waiting requests whose keys and values a KV connector brings: it doesn't know yet which (waiting_to_start), "
        "brings them (in_progress), or has brought them (completed_waiting).",
        "stage",
        {
            "waiting_to_start": lambda rank: rank.kv_fetches.get("waiting_to_start", 0),
            "in_progress": lambda rank: rank.kv_fetches.get("in_progress", 0),
            "completed_waiting": lambda rank: rank.kv_fetches.get("completed_waiting", 0),
        },
    ),
)
"""Gauges with one more label: name, help text, name of the label, and a function that computes the gauge for each value
of the label."""

RESTARTS = "raycore_rank_restarts", "How often the rank was replaced by a new process."
WITHOUT_RANK = (
    "raycore_requests_without_rank",
    "Requests that wait because no rank serves, or the engine is paused.",
)
COUNTERS = (
    ("vllm:num_preemptions", "Preemptions of running requests.", "num_preemptions"),
    ("vllm:prompt_tokens", "Prompt tokens, cached ones included.", "num_prompt_tokens"),
    (
        "vllm:prompt_tokens_cached",
        "Prompt tokens that the prefix cache had or a KV connector brought.",
        "num_cached_prompt_tokens",
    ),
    ("vllm:generation_tokens", "Generated tokens.", "num_output_tokens"),
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", "num_prefix_queries"),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", "num_prefix_hits"),
    (
        "vllm:external_prefix_cache_queries",
        "Tokens that the prefix cache didn't have, and a KV connector was asked for.",
        "num_external_queries",
    ),
    ("vllm:external_prefix_cache_hits", "Tokens that a KV connector brought.", "num_external_hits"),
    ("vllm:mm_cache_queries", "Images looked up among the processed ones that the server keeps.", "num_image_lookups"),
    ("vllm:mm_cache_hits", "Images found there.", "num_image_hits"),
    ("vllm:spec_decode_num_drafts", "How many times a step had drafts for a request.", "num_drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", "num_draft_tokens"),
    ("vllm:spec_decode_num_accepted_tokens", "Drafted tokens that were right.", "num_accepted_tokens"),
)

LABELLED_COUNTERS: tuple[tuple[str, str, str, Callable[[RankCounts], dict[str, int]]], ...] = (
    (
        "vllm:request_success",
        "Requests that have ended, by finished_reason.",
        "finished_reason",
        lambda counts: counts.num_finished,
    ),
    (
        "vllm:prompt_tokens_by_source",
        "Prompt tokens that were computed, that the prefix cache had, or that a KV connector brought.",
        "source",
        lambda counts: {
            "local_compute": counts.num_prompt_tokens - counts.num_cached_prompt_tokens,
            "local_cache_hit": counts.num_cached_prompt_tokens - counts.num_external_prompt_tokens,
            "external_kv_transfer": counts.num_external_prompt_tokens,
        },
    ),
    (
        "vllm:prompt_tokens_cached_by_source",
        "Tokens that the prefix cache had (device), or that a KV connector brought: from the host's memory, from disk, "
        "from other ranks (p2p), or from where it doesn't say.",
        "source",
        lambda counts: {
            "device": counts.num_prefix_hits,
            "host": counts.num_host_hits,
            "p2p": counts.num_p2p_hits,
            "disk": counts.num_disk_hits,
            "external_unspecified": counts.num_unspecified_hits,
        },
    ),
    (
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were right, by their position in the draft.",
        "position",
        lambda counts: {str(position): number for position, number in enumerate(counts.num_accepted_per_position)},
    ),
)
"""Counters with one more label: name, help text, name of the label, and a function that returns the counts by value of
the label."""

HISTOGRAMS = (
    ("vllm:time_to_first_token_seconds", "From a request's arrival to its first token.", "first_token_s"),
    ("vllm:inter_token_latency_seconds", "Between two tokens of a request.", "between_tokens_s"),
    (
        "vllm:time_per_output_token_seconds",
        "vllm:inter_token_latency_seconds under its older name.",
        "between_tokens_s",
    ),
    (
        "vllm:request_time_per_output_token_seconds",
        "A request's mean time between tokens.",
        "per_output_token_s",
    ),
    ("vllm:e2e_request_latency_seconds", "From a request's arrival to its end.", "request_s"),
    ("vllm:request_queue_time_seconds", "From a request's arrival in the engine to its first step.", "queue_s"),
    ("vllm:request_prefill_time_seconds", "From a request's first step to its first token.", "prefill_s"),
    ("vllm:request_decode_time_seconds", "From a request's first token to its last.", "decode_s"),
    ("vllm:request_inference_time_seconds", "From a request's first step to its last token.", "inference_s"),
    (
        "vllm:iteration_tokens_total",
        "Tokens of a step: those generated, and the prompts that it completed.",
        "step_tokens",
    ),
    ("vllm:request_prompt_tokens", "A request's prompt tokens.", "prompt_tokens"),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "A request's prompt tokens that were computed.",
        "computed_prompt_tokens",
    ),
    ("vllm:request_generation_tokens", "A request's generated tokens.", "output_tokens"),
    (
        "vllm:request_max_num_generation_tokens",
        "Generated tokens of the longest of a request's n sequences.",
        "longest_output_tokens",
    ),
    ("vllm:request_num_preemptions", "How often a request was preempted.", "preemptions"),
    ("vllm:request_params_max_tokens", "The max_tokens of requests.", "max_tokens"),
    ("vllm:request_params_n", "The n of requests.", "n"),
)


class MetricFamily(NamedTuple):
    """A gauge or a counter of all ranks."""

    is_gauge: bool
    name: str
    text: str
    labels: tuple[str, ...]
    """Those of all numbers, besides the rank."""
    numbers: Sequence[tuple[int, dict[str, str], float]]
    """dp_rank, the values of `labels` by their names, and the number."""


def families(view: MetricsView) -> Iterator[MetricFamily]:
    """Yield all gauges and counters of ranks. The counters of ranks that are gone stay."""
    ranks = view.counts.items()
    for name, text, value_of in GAUGES:
        yield MetricFamily(True, name, text, (), [(rank.dp_rank, {}, value_of(rank)) for rank in view.ranks])
    for name, text, label, values in LABELLED_GAUGES:
        gauges = [
            (rank.dp_rank, {label: key}, value_of(rank)) for rank in view.ranks for key, value_of in values.items()
        ]
        yield MetricFamily(True, name, text, (label,), gauges)
    yield MetricFamily(False, *RESTARTS, (), [(rank.dp_rank, {}, rank.num_restarts) for rank in view.ranks])
    for name, text, field in COUNTERS:
        yield MetricFamily(False, name, text, (), [(rank, {}, getattr(counts, field)) for rank, counts in ranks])
    for name, text, label, values_of in LABELLED_COUNTERS:
        counters = [(rank, {label: key}, number) for rank, own in ranks for key, number in values_of(own).items()]
        yield MetricFamily(False, name, text, (label,), counters)
