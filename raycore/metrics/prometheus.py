"""An engine's metrics in Prometheus' format: those of vLLM, with its names, labels and meanings, and raycore's own.

The label `engine` is the dp_rank. No state is kept: each scrape converts the current counts to samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from raycore.metrics.catalog import HISTOGRAMS, WITHOUT_RANK, families
from raycore.metrics.counts import BucketCounts, RankCounts
from raycore.metrics.view import MetricsView
from raycore.system import time

LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """The collector that a Prometheus registry asks for an engine's samples."""

    def __init__(self, read: Callable[[], MetricsView], model_name: str) -> None:
        """Store the arguments.

        Args:
            read: returns the engine's current metrics.
            model_name: the first name under which the model is served.
        """
        self._read = read
        self._model_name = model_name

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the collector can be registered without a running engine."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield all metrics. Each has samples for each rank, except the one that `WITHOUT_RANK` describes."""
        view = self._read()
        for family in families(view):
            make = GaugeMetricFamily if family.is_gauge else CounterMetricFamily
            metric = make(family.name, family.text, labels=(*LABELS, *family.labels))
            for dp_rank, labels, number in family.numbers:
                metric.add_metric([*self._labels(dp_rank), *labels.values()], number)
            yield metric
        waiting = GaugeMetricFamily(*WITHOUT_RANK, labels=("model_name",))
        waiting.add_metric([self._model_name], view.num_waiting_for_rank)
        yield waiting
        yield from self._histograms(view.counts)
        yield _cache_config(view)
        if any(rank.max_loras for rank in view.infos):
            yield _adapters(view)

    def _histograms(self, ranks: dict[int, RankCounts]) -> Iterable[Metric]:
        for name, text, field in HISTOGRAMS:
            family = HistogramMetricFamily(name, text, labels=LABELS)
            for dp_rank, counts in ranks.items():
                histogram: BucketCounts = getattr(counts, field)
                family.add_metric(self._labels(dp_rank), cumulative(histogram), histogram.sum)
            yield family

    def _labels(self, dp_rank: int) -> list[str]:
        return [self._model_name, str(dp_rank)]


def cumulative(histogram: BucketCounts) -> list[tuple[str, float]]:
    """Each bucket's upper bound, as text, and the number of values up to it, as Prometheus expects."""
    bounds = [str(bound) for bound in histogram.bounds]
    return list(zip([*bounds, "+Inf"], accumulate(histogram.counts), strict=True))


def _cache_config(view: MetricsView) -> Metric:
    """A metric with the size of each rank's KV cache, for autoscalers and gateways."""
    shown = [
        {
            "engine": rank.dp_rank,
            "block_size": rank.block_size,
            "num_gpu_blocks": rank.num_blocks,
            "cache_dtype": rank.kv_cache_dtype,
            "enable_prefix_caching": rank.enable_prefix_caching,
            "gpu_memory_utilization": rank.gpu_memory_utilization,
            "kv_cache_size_tokens": rank.num_kv_tokens,
            "kv_cache_max_concurrency": rank.num_kv_tokens / rank.max_model_len,
        }
        for rank in view.infos
    ]
    labels = list(shown[0]) if shown else []
    info = GaugeMetricFamily("vllm:cache_config_info", "A rank's KV cache.", labels=labels)
    for each in shown:
        info.add_metric([str(value) for value in each.values()], 1)
    return info


def _adapters(view: MetricsView) -> Metric:
    """A metric with the names of the adapters in use, for gateways that send requests to ranks that hold them."""
    labels = ("engine", "max_lora", "running_lora_adapters", "waiting_lora_adapters")
    text = "The LoRA adapters of a rank's running and waiting requests. The value is the time, in seconds since 1970."
    info = GaugeMetricFamily("vllm:lora_requests_info", text, labels=labels)
    max_loras = {rank.dp_rank: rank.max_loras for rank in view.infos}
    for rank in view.ranks:
        if rank.dp_rank in max_loras:
            names = ",".join(rank.running_adapters), ",".join(rank.waiting_adapters)
            info.add_metric([str(rank.dp_rank), str(max_loras[rank.dp_rank]), *names], time.time())
    return info
