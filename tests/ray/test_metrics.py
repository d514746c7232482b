"""What a real engine's numbers come to: `/metrics`, Ray's own export, and its processes' log lines."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from number_formats import DTYPE
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from waiting import eventually

from raycore import AsyncLLM, SamplingParams
from raycore.demo import demo_model_path
from raycore.server import ServerOptions, build_app

EXPORTER = InMemorySpanExporter()


def kept_spans(endpoint: str) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(EXPORTER))
    return provider


@pytest.fixture(scope="module")
def engine(ray_cluster):
    logger = logging.getLogger("raycore")
    level = logger.level
    logger.setLevel(logging.INFO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raycore.running_engine.INTERVAL_S", 0.5)
        patch.setattr("raycore.parts.traces.client.spans.start_tracing", kept_spans)
        options = {"num_threads": 1, "max_model_len": 1000, "dtype": DTYPE, "standby_delay_s": None, "gc_debug": 2}
        options["otlp_traces_endpoint"] = "http://localhost:4317"
        engine = AsyncLLM(demo_model_path(), engine_name="seen", **options)
    logger.setLevel(level)
    check_start(EXPORTER.get_finished_spans())
    yield engine
    engine.shutdown()


def check_start(spans: Sequence[ReadableSpan]) -> None:
    """The spans of a start of one rank, whose worker is in its process."""
    named = {span.name: span for span in spans if span.name.endswith("start")}
    whole, rank, worker = (named[f"{name} start"] for name in ("engine", "rank", "worker"))
    assert (rank.parent.span_id, worker.parent.span_id) == (whole.context.span_id, rank.context.span_id)
    assert whole.start_time <= rank.start_time <= worker.start_time < worker.end_time <= whole.end_time
    of_worker = {span.name for span in spans if span.parent and span.parent.span_id == worker.context.span_id}
    assert of_worker == {"init device", "load weights", "allocate cache", "warm up"}
    of_rank = {span.name for span in spans if span.parent and span.parent.span_id == rank.context.span_id}
    assert of_rank == {"process start", "workers and weights", "kv cache and warm up", "worker start"}


@pytest.fixture(scope="module")
def client(engine):
    return TestClient(build_app(engine, ServerOptions(("demo",))))


def collect_garbage(worker: object) -> int:
    return gc.collect()


def parse(text: str) -> dict[str, float]:
    """Samples by name, followed by the finished_reason or handler where there is one."""
    return {
        " ".join(
            [sample.name, *(sample.labels[label] for label in ("finished_reason", "handler") if label in sample.labels)]
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("engine", "0") == "0" and "le" not in sample.labels
    }


def test_finished_requests_are_counted_in_prometheus_metrics(client):
    prompt = "".join(f"{i} + {i} = {2 * i}\n" for i in range(20)) + "27 + 58 ="
    body = {"model": "demo", "prompt": prompt, "max_tokens": 20, "ignore_eos": True, "temperature": 1}
    for _ in range(2):
        answer = client.post("/v1/completions", json=body).json()
    with client.stream("POST", "/v1/completions", json=body | {"n": 2, "stream": True}) as stream:
        assert [line for line in stream.iter_lines() if line][-1] == "data: [DONE]"
    samples = parse(client.get("/metrics").text)
    num_prompt = answer["usage"]["prompt_tokens"]
    num_cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert samples["vllm:prompt_tokens_total"] == samples["vllm:prefix_cache_queries_total"] == 4 * num_prompt
    assert samples["vllm:generation_tokens_total"] == 80
    assert samples["vllm:prefix_cache_hits_total"] == samples["vllm:prompt_tokens_cached_total"] == 3 * num_cached > 0
    assert samples["vllm:request_success_total length"] == 4
    assert samples["vllm:inter_token_latency_seconds_count"] == 76
    assert samples["vllm:iteration_tokens_total_sum"] == 4 * num_prompt + 80
    assert samples["vllm:request_params_n_sum"] == 4
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert samples[f"vllm:{name}_seconds_count"] == 4
        assert samples[f"vllm:{name}_seconds_sum"] > 0
    phases = sum(samples[f"vllm:request_{phase}_time_seconds_sum"] for phase in ("queue", "prefill", "decode"))
    assert phases == pytest.approx(samples["vllm:e2e_request_latency_seconds_sum"])
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["http_requests_total /v1/completions"] == 3


def test_an_aborted_request_is_counted_with_the_finish_reason_abort(engine):
    async def leave_early() -> None:
        async with aclosing(engine.generate("27 + 58 =", SamplingParams(max_tokens=900, ignore_eos=True))) as outputs:
            await anext(outputs)

    before = engine.read_metrics().counts[0]
    asyncio.run(leave_early())
    after = engine.read_metrics().counts[0]
    assert after.num_finished["abort"] - before.num_finished["abort"] == 1
    assert after.request_s == before.request_s


@pytest.mark.parametrize(
    ("logger", "text"),
    [
        ("engine.cache_size", "the KV cache holds"),
        ("node.garbage", r"garbage collection: generation 2, \d+\.\d\d ms, \d+ collected; of \d+ objects: \S+ \d+, "),
    ],
)
def test_log_lines_of_ranks_name_the_rank_and_its_pid(ray_cluster, engine, logger, text):
    asyncio.run(engine.collective_rpc(collect_garbage))
    (info,) = engine.engine_infos
    context = ray_cluster.get_runtime_context()
    logs = Path(context.get_temp_dir(), context.get_session_name(), "logs")
    pattern = rf"^INFO \d\d-\d\d \d\d:\d\d:\d\d raycore\.{logger} \[dp0 pid {info.pid}\] {text}"
    eventually(
        lambda: any(re.search(pattern, path.read_text(), re.M) for path in logs.glob(f"worker-*-{info.pid}.err"))
    )


def check_steps(spans: Sequence[ReadableSpan]) -> None:
    (generate,) = (span for span in spans if span.name == "generate")
    steps = [span for span in spans if span.name == "worker step"]
    assert len(steps) == 5
    assert {span.attributes["raycore.dp_rank"] for span in steps} == {0}
    assert all(generate.start_time <= span.start_time < span.end_time <= generate.end_time for span in steps)
    assert {span.name for span in spans} >= {"queue", "prefill", "decode"}


def test_a_requests_trace_contains_the_steps_of_the_workers(engine, client):
    assert asyncio.run(engine.is_tracing_enabled())
    for asks in (over_http, in_python):
        EXPORTER.clear()
        asks(engine, client)
        check_steps(EXPORTER.get_finished_spans())


def over_http(engine: AsyncLLM, client: TestClient) -> None:
    body = {"model": "demo", "prompt": "27 + 58 =", "max_tokens": 5, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 200


def in_python(engine: AsyncLLM, client: TestClient) -> None:
    async def run() -> None:
        async with aclosing(engine.generate("27 + 58 =", SamplingParams(max_tokens=5, ignore_eos=True))) as outputs:
            async for _ in outputs:
                pass

    asyncio.run(run())
