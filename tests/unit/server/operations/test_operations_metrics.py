"""`GET /metrics` over a fake engine."""

from __future__ import annotations

import msgspec
import pytest
from fake_engine import FakeEngine
from fastapi.testclient import TestClient
from metric_views import make_view
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_format
from prometheus_client.parser import text_string_to_metric_families

from raycore.server import ServerOptions, build_app
from raycore.server.http.counts import SLEEP_MODE, WEIGHT_UPDATE, HttpCounts, total
from raycore.server.multi_process.reports import Report
from raycore.server.operations.metrics import Metrics


@pytest.fixture
def client():
    app = build_app(FakeEngine(metrics=make_view(num_running=2)), ServerOptions(("m",), api_keys=("key",)))
    return TestClient(app, headers={"authorization": "Bearer key"})


def samples(client) -> dict[tuple[str, str], float]:
    """By name and handler."""
    answer = client.get("/metrics", headers={"authorization": ""})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (
            sample.name,
            " ".join(sample.labels[label] for label in ("method", "status", "handler") if label in sample.labels),
        ): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_the_metrics_endpoint_shows_the_engines_metrics_without_a_key(client):
    assert samples(client)["vllm:num_requests_running", ""] == 2


def test_http_requests_are_counted_by_method_status_and_path(client):
    client.get("/v1/models")
    client.get("/v1/models/m")
    client.get("/v1/models/other")
    client.get("/v1/models", headers={"authorization": "Bearer wrong"})
    client.get("/no/such/path")
    client.post("/v1/completions", json={"max_tokens": "many"})
    counted = {labels: value for (name, labels), value in samples(client).items() if name == "http_requests_total"}
    assert counted == {
        "GET 2xx /v1/models": 1,
        "GET 4xx /v1/models": 1,
        "GET 2xx /v1/models/{model:path}": 1,
        "GET 4xx /v1/models/{model:path}": 1,
        "GET 4xx none": 1,
        "POST 4xx /v1/completions": 1,
    }
    assert samples(client)["http_request_duration_seconds_count", "GET /v1/models"] == 2


def test_each_of_several_servers_shows_the_sum_of_their_http_counts(client):
    for _ in range(2):
        client.get("/v1/models")
    own = client.app.state.service.http_counts
    reported = msgspec.msgpack.decode(msgspec.msgpack.encode(Report(http=own)), type=Report).http
    other = HttpCounts()
    other.add("GET", "2xx", "/v1/models", 3.0)
    other.add("POST", "4xx", "/tokenize", 0.2)
    before = samples(client)
    assert ("process_open_fds", "") in before
    client.app.state.service.own(Metrics).all_http_counts = total([reported, other])
    shown = samples(client)
    assert shown["http_requests_total", "GET 2xx /v1/models"] == 3
    assert shown["http_requests_total", "POST 4xx /tokenize"] == 1
    assert shown["http_request_duration_seconds_count", "GET /v1/models"] == 3
    assert 3.0 < shown["http_request_duration_seconds_sum", "GET /v1/models"] < 3.5
    assert ("process_open_fds", "") not in shown
    assert own.requests == {("GET", "2xx", "/v1/models"): 2}


def test_sleeps_and_changes_of_weights_are_timed_also_if_they_fail():
    options = ServerOptions(("m",), api_keys=("key",), enable_admin_endpoints=True)
    admin = TestClient(build_app(FakeEngine(metrics=make_view()), options), headers={"authorization": "Bearer key"})
    for path in ("/sleep?level=0", "/sleep?level=2", "/wake_up", "/start_weight_update", "/sleep?level=9"):
        admin.post(path)
    counts = admin.app.state.service.http_counts
    sleep, update = (SLEEP_MODE, "sleep"), (WEIGHT_UPDATE, "start")
    expected = {sleep: 2, (SLEEP_MODE, "wake"): 1, update: 1}
    assert {key: histogram.count for key, histogram in counts.operations.items()} == expected
    with counts.operation(*sleep):
        text = admin.get("/metrics").text
    assert 'vllm:sleep_mode_operation_duration_seconds_count{operation="wake"} 1.0' in text
    assert 'vllm:sleep_mode_operations_in_flight{operation="sleep"} 1.0' in text
    assert 'vllm:rl_weight_update_operation_duration_seconds_count{operation="start"} 1.0' in text
    reported = msgspec.msgpack.decode(msgspec.msgpack.encode(Report(http=counts)), type=Report).http
    both = total([counts, reported])
    assert (both.operations[sleep].count, both.in_flight[update]) == (6, 0)


def test_a_root_path_and_unknown_methods_add_no_metric_labels(client):
    mounted = TestClient(client.app, root_path="/serve", headers={"authorization": "Bearer key"})
    for path in ("/health", "/metrics"):
        mounted.get(f"/serve{path}")
    mounted.get("/serve/v1/models", headers={"authorization": "Bearer wrong"})
    client.request("BREW", "/v1/models")
    counted = [labels for name, labels in samples(client) if name == "http_requests_total"]
    assert sorted(counted) == ["GET 4xx /v1/models", "other 4xx /v1/models"]


def test_probes_and_scrapes_are_not_counted(client):
    for path in ("/health", "/ping", "/version", "/metrics"):
        client.get(path)
    assert not [labels for name, labels in samples(client) if name == "http_requests_total"]


def test_the_metrics_endpoint_answers_in_the_openmetrics_format_on_request(client):
    client.get("/v1/models")
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    answer = client.get("/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    families = {family.name: family for family in parse_open_format(answer.text)}
    assert {"http_requests", "process_resident_memory_bytes", "vllm:num_requests_running"} <= families.keys()
    names = {sample.name for family in families.values() for sample in family.samples}
    assert {"vllm:num_requests_running", "vllm:prompt_tokens_total", "vllm:request_queue_time_seconds_bucket"} <= names
    assert not [name for name in names if name.startswith("vllm_")]
