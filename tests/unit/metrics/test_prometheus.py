"""The text that Prometheus reads, parsed by Prometheus' own parser."""

from __future__ import annotations

import time
from dataclasses import replace

import msgspec
import pytest
from metric_views import make_view
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from raycore.metrics.prometheus import EngineCollector
from raycore.metrics.view import MetricsView
from raycore.status import RankStatus


def scrape(view: MetricsView) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: view, "m"))
    return registry


def value(view: MetricsView, name: str, engine: int = 0, **labels: str) -> float | None:
    return scrape(view).get_sample_value(name, {"model_name": "m", "engine": str(engine), **labels})


def test_every_metric_exists_from_the_start_with_vllms_labels():
    text = generate_latest(scrape(make_view(2))).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        family = families[f"vllm:{name}"]
        assert family.type == "gauge"
        assert [sample.labels for sample in family.samples] == [
            {"model_name": "m", "engine": "0"},
            {"model_name": "m", "engine": "1"},
        ]
    counters = ("prompt_tokens", "generation_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
    drafts = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    for name in (*counters, *drafts):
        family = families[f"vllm:{name}"]
        assert family.type == "counter"
        assert {sample.name for sample in family.samples} == {f"vllm:{name}_total"}
    reasons = {sample.labels["finished_reason"] for sample in families["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "repetition", "abort", "error"}
    assert families["vllm:e2e_request_latency_seconds"].type == "histogram"
    labels = {"engine": "0", "block_size": "16", "num_gpu_blocks": "64", "cache_dtype": "auto"}
    labels |= {"enable_prefix_caching": "True", "gpu_memory_utilization": "0.0"}
    labels |= {"kv_cache_size_tokens": "1024", "kv_cache_max_concurrency": "1.024"}
    assert families["vllm:cache_config_info"].samples[0].labels == labels
    assert "vllm:lora_requests_info" not in families


def test_the_adapters_in_use_are_labels_as_gateways_read_them():
    view = make_view(2, running_adapters=("sql", "sums"), waiting_adapters=("sql",))
    view = replace(view, infos=[msgspec.structs.replace(view.infos[1], max_loras=4)])  # rank 0 isn't up
    (family,) = [each for each in scrape(view).collect() if each.name == "vllm:lora_requests_info"]
    (sample,) = family.samples
    assert sample.labels == {
        "engine": "1",
        "max_lora": "4",
        "running_lora_adapters": "sql,sums",
        "waiting_lora_adapters": "sql",
    }
    assert abs(sample.value - time.time()) < 60


def test_gauges_show_each_ranks_load_and_state():
    view = make_view(num_running=3, num_waiting=2, kv_usage=0.25, num_restarts=4)
    assert value(view, "vllm:num_requests_running") == 3
    assert value(view, "vllm:num_requests_waiting") == 2
    assert value(view, "vllm:kv_cache_usage_perc") == 0.25
    assert value(view, "raycore_rank_serving") == 1
    assert value(view, "raycore_rank_restarts_total") == 4
    view = replace(view, ranks=[RankStatus(0, "restarting", ["node"])], num_waiting_for_rank=9)
    assert value(view, "raycore_rank_serving") == 0
    assert value(view, "raycore_rank_unplaced") == 0
    assert value(replace(view, ranks=[RankStatus(0, "unplaced", [])]), "raycore_rank_unplaced") == 1
    assert scrape(view).get_sample_value("raycore_requests_without_rank", {"model_name": "m"}) == 9


def test_counters_and_histograms_are_shown_for_each_rank():
    view = make_view(2)
    counts = view.counts[1]
    counts.num_output_tokens = 7
    counts.num_finished["length"] = 2
    for seconds in (0.002, 0.03, 0.03, 5000.0):
        counts.first_token_s.observe(seconds)
    assert value(view, "vllm:generation_tokens_total", 0) == 0
    assert value(view, "vllm:generation_tokens_total", 1) == 7
    assert value(view, "vllm:request_success_total", 1, finished_reason="length") == 2
    name = "vllm:time_to_first_token_seconds"
    assert value(view, f"{name}_bucket", 1, le="0.001") == 0
    assert value(view, f"{name}_bucket", 1, le="0.04") == 3
    assert value(view, f"{name}_bucket", 1, le="+Inf") == value(view, f"{name}_count", 1) == 4
    assert value(view, f"{name}_sum", 1) == 5000.062


def test_accepted_drafts_are_counted_by_position():
    view = make_view()
    view.counts[0].num_draft_tokens = 20
    view.counts[0].num_accepted_per_position = [5, 3, 0]
    assert value(view, "vllm:spec_decode_num_draft_tokens_total") == 20
    assert value(view, "vllm:spec_decode_num_accepted_tokens_total") == 8
    name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(view, name, position=str(position)) for position in range(4)] == [5, 3, 0, None]


def test_the_counters_of_a_removed_rank_are_kept():
    view = make_view(2)
    view.counts[1].num_output_tokens = 7
    view = replace(view, ranks=view.ranks[:1])
    assert value(view, "vllm:generation_tokens_total", 1) == 7
    assert value(view, "vllm:num_requests_running", 1) is None


def test_a_serving_rank_counts_as_awake():
    states = {
        state: {
            name: value(view, "vllm:engine_sleep_state", sleep_state=name)
            for name in ("awake", "weights_offloaded", "discard_all")
        }
        for state, view in {
            state: replace(make_view(), ranks=[RankStatus(0, state, ["node"])])
            for state in ("serving", "leaving", "restarting", "gone")
        }.items()
    }
    awake = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert states["serving"] == states["leaving"] == awake
    assert states["restarting"] == states["gone"] == awake | {"awake": 0}


@pytest.mark.parametrize(("level", "name"), [(1, "weights_offloaded"), (2, "discard_all")])
def test_a_sleeping_rank_counts_as_asleep(level, name):
    view = replace(make_view(), ranks=[RankStatus(0, "asleep", ["node"], sleep_level=level)])
    names = ("awake", "weights_offloaded", "discard_all")
    assert {each: value(view, "vllm:engine_sleep_state", sleep_state=each) for each in names} == {
        each: int(each == name) for each in names
    }


def test_waiting_requests_are_counted_by_their_reason():
    view = make_view(num_waiting=5, num_deferred=2)
    assert value(view, "vllm:num_requests_waiting") == 5
    assert value(view, "vllm:num_requests_waiting_by_reason", reason="capacity") == 3
    assert value(view, "vllm:num_requests_waiting_by_reason", reason="deferred") == 2
