"""An engine's numbers as Prometheus reads them: vLLM's names, labels and meanings, and a few of our own.

`engine` is the dp_rank. Nothing is kept here: each scrape turns the counts, as they are then, into samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raycore.metrics.counts import Histogram, RankCounts
from raycore.metrics.view import MetricsView
from raycore.status import RankStatus

LABELS = ("model_name", "engine")

_GAUGES: tuple[tuple[str, str, Callable[[RankStatus], float]], ...] = (
    ("vllm:num_requests_running", "Requests that the rank computes tokens for.", lambda rank: rank.num_running),
    ("vllm:num_requests_waiting", "Requests that the rank has no room for yet.", lambda rank: rank.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", lambda rank: rank.kv_usage),
    ("raycore_rank_serving", "1 while the rank takes requests.", lambda rank: rank.state == "serving"),
)

_RESTARTS = "raycore_rank_restarts", "How often another process has taken the rank's place."

_COUNTERS = (
    ("vllm:num_preemptions", "Running requests that had to start over.", "num_preemptions"),
    ("vllm:prompt_tokens", "Prompt tokens, cached ones included.", "num_prompt_tokens"),
    ("vllm:prompt_tokens_cached", "Prompt tokens that the prefix cache held.", "num_cached_prompt_tokens"),
    ("vllm:generation_tokens", "Generated tokens.", "num_output_tokens"),
    ("vllm:prefix_cache_queries", "Tokens that were looked for in the prefix cache.", "num_prefix_queries"),
    ("vllm:prefix_cache_hits", "Tokens that the prefix cache held.", "num_prefix_hits"),
)

_HISTOGRAMS = (
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
    ("vllm:request_prompt_tokens", "A request's prompt tokens.", "prompt_tokens"),
    (
        "vllm:request_prefill_kv_computed_tokens",
        "A request's prompt tokens that the prefix cache didn't hold.",
        "computed_prompt_tokens",
    ),
    ("vllm:request_generation_tokens", "A request's generated tokens.", "output_tokens"),
    (
        "vllm:request_max_num_generation_tokens",
        "Generated tokens of the longest of a request's n sequences.",
        "longest_output_tokens",
    ),
    ("vllm:request_params_max_tokens", "The max_tokens that requests ask for.", "max_tokens"),
    ("vllm:request_params_n", "The n that requests ask for.", "n"),
)


class EngineCollector(Collector):
    """What a registry asks for an engine's samples."""

    def __init__(self, read: Callable[[], MetricsView], model_name: str) -> None:
        """
        Args:
            read: the engine's numbers as they are now.
            model_name: the first name under which the model is served.
        """
        self._read = read
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Nothing: to be registered must not need a running engine."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """All metrics, each with a sample for each rank."""
        view = self._read()
        yield from self._gauges(view)
        yield from self._counters(view.counts)
        yield from self._histograms(view.counts)
        yield _cache_config(view)

    def _gauges(self, view: MetricsView) -> Iterable[Metric]:
        for name, text, value_of in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            for rank in view.ranks:
                gauge.add_metric(self._labels(rank.dp_rank), value_of(rank))
            yield gauge
        restarts = CounterMetricFamily(*_RESTARTS, labels=LABELS)
        for rank in view.ranks:
            restarts.add_metric(self._labels(rank.dp_rank), rank.num_restarts)
        yield restarts
        waiting = GaugeMetricFamily(
            "raycore_requests_without_rank", "Requests that wait because no rank serves.", labels=("model_name",)
        )
        waiting.add_metric([self._model_name], view.num_waiting_for_rank)
        yield waiting

    def _counters(self, ranks: dict[int, RankCounts]) -> Iterable[Metric]:
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=LABELS)
            for dp_rank, counts in ranks.items():
                counter.add_metric(self._labels(dp_rank), getattr(counts, field))
            yield counter
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests that have ended.", labels=(*LABELS, "finished_reason")
        )
        for dp_rank, counts in ranks.items():
            for reason, number in counts.num_finished.items():
                ended.add_metric([*self._labels(dp_rank), reason], number)
        yield ended

    def _histograms(self, ranks: dict[int, RankCounts]) -> Iterable[Metric]:
        for name, text, field in _HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for dp_rank, counts in ranks.items():
                histogram: Histogram = getattr(counts, field)
                family.add_metric(self._labels(dp_rank), _cumulative(histogram), histogram.sum)
            yield family

    def _labels(self, dp_rank: int) -> list[str]:
        return [self._model_name, str(dp_rank)]


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    bounds = [str(bound) for bound in histogram.bounds]
    return list(zip([*bounds, "+Inf"], accumulate(histogram.counts), strict=True))


def _cache_config(view: MetricsView) -> Metric:
    """What autoscalers and gateways read to know how much a rank holds."""
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "A rank's KV cache.", labels=("engine", "block_size", "num_gpu_blocks")
    )
    for rank in view.infos:
        info.add_metric([str(rank.dp_rank), str(rank.block_size), str(rank.num_blocks)], 1)
    return info
