"""Spans of requests to a fake engine, as the SDK's in-memory exporter gets them."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest
from fake_engine import EMBEDS, FakeEngine
from fastapi.testclient import TestClient
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from raycore.errors import RequestFailed
from raycore.parts.traces.client.spans import SentTraces
from raycore.server import ServerOptions, build_app

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"


def traced(engine: FakeEngine) -> tuple[TestClient, InMemorySpanExporter]:
    """A client of the engine's app, and where its spans go."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    engine.traces = SentTraces(provider)
    engine.traces.watch(engine, "path/of/m")  # as engines do when they start
    return TestClient(build_app(engine, ServerOptions(("m",))), raise_server_exceptions=False), exporter


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def spans(engine):
    """Asks the app, and gives the spans by name."""
    client, exporter = traced(engine)

    def ask(**options):
        body = {"model": "m", "prompt": "1 + 1", "max_tokens": 3, **options.pop("body", {})}
        answer = client.post("/v1/completions", json=body, **options)
        found: dict[str, list] = {}
        for span in exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        exporter.clear()
        return answer, found

    ask.client, ask.exporter = client, exporter
    return ask


@pytest.fixture
def pooled_spans():
    """Asks an app of a model that pools for embeddings, and gives the spans by name."""
    engine = FakeEngine(pooling=EMBEDS)
    client, exporter = traced(engine)

    def ask(**body):
        answer = client.post("/v1/embeddings", json=body, headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"})
        found: dict[str, list] = {}
        for span in exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return answer, found

    ask.engine = engine
    return ask


def test_a_request_that_pools_has_a_span_for_its_prompts(pooled_spans):
    answer, found = pooled_spans(input=["a b", "c"])
    assert answer.status_code == 200
    (http,), (encode,) = found["POST /v1/embeddings"], found["encode"]
    assert f"{http.context.trace_id:032x}" == TRACE_ID
    assert encode.parent.span_id == http.context.span_id
    assert encode.attributes["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert (encode.attributes["raycore.num_prompts"], encode.attributes["raycore.task"]) == (2, "embed")


def test_the_span_of_a_prompt_that_fails_says_so(pooled_spans):
    def fail():
        raise RequestFailed("worker died too often")

    pooled_spans.engine.before_result = fail
    answer, found = pooled_spans(input="a")
    assert answer.status_code == 500
    assert found["encode"][0].status.status_code == StatusCode.ERROR


def seconds(span) -> float:
    return (span.end_time - span.start_time) / 1e9


@pytest.mark.parametrize("stream", [False, True])
def test_a_trace_has_spans_from_http_to_the_workers_steps(spans, engine, stream):
    engine.queue_s, engine.step_s = 0.25, 0.5
    answer, found = spans(body={"stream": stream}, headers={"X-data-parallel-rank": "1"})
    assert answer.status_code == 200
    (http,), (generate,) = found["POST /v1/completions"], found["generate"]
    (queue,), (prefill,), (decode,) = found["queue"], found["prefill"], found["decode"]
    assert http.parent is None
    assert generate.parent.span_id == http.context.span_id
    assert {span.parent.span_id for span in (queue, prefill, decode)} == {generate.context.span_id}
    phases = {prefill.context.span_id: "prefill", decode.context.span_id: "decode"}
    assert [phases[step.parent.span_id] for step in found["worker step"]] == ["prefill", "decode", "decode"]
    assert [seconds(span) for span in (queue, prefill, decode)] == pytest.approx([0.25, 0.5, 1.0], abs=1e-3)
    assert queue.attributes["raycore.dp_rank"] == 1
    assert decode.attributes["raycore.num_steps"] == 2
    assert abs(decode.end_time / 1e9 - time.time()) < 60
    assert http.attributes["http.response.status_code"] == 200
    asked = {name: generate.attributes[f"gen_ai.{name}"] for name in ("request.model", "request.max_tokens")}
    assert asked == {"request.model": "m", "request.max_tokens": 3}
    used = {name: generate.attributes[f"gen_ai.usage.{name}"] for name in ("input_tokens", "completion_tokens")}
    num_prompt_tokens = len(engine.tokenizer.encode("1 + 1"))
    assert used == {"input_tokens": num_prompt_tokens, "completion_tokens": 3}
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("length",)


def test_a_request_belongs_to_its_callers_trace(spans):
    _, found = spans(headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"})
    (http,) = found["POST /v1/completions"]
    assert f"{http.parent.span_id:016x}" == PARENT_ID
    assert {f"{span.context.trace_id:032x}" for each in found.values() for span in each} == {TRACE_ID}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_beam_search_has_a_span(spans, path):
    messages = [{"role": "user", "content": "1 + 1"}]
    given = {"prompt": "1 + 1"} if path == "/v1/completions" else {"messages": messages}
    answer = spans.client.post(path, json={"model": "m", "use_beam_search": True, "n": 2, "max_tokens": 3, **given})
    found = {span.name: span for span in spans.exporter.get_finished_spans()}
    http, generate = found[f"POST {path}"], found["generate"]
    assert generate.parent.span_id == http.context.span_id
    assert generate.attributes["raycore.beam_width"] == 2
    assert generate.attributes["gen_ai.request.max_tokens"] == 3
    used = answer.json()["usage"]
    assert generate.attributes["gen_ai.usage.input_tokens"] == used["prompt_tokens"]
    assert generate.attributes["gen_ai.usage.output_tokens"] == used["completion_tokens"]
    assert generate.attributes["gen_ai.response.finish_reasons"] == ("stop", "stop")


def test_a_beam_search_that_fails_has_a_span_with_the_error(spans, engine):
    engine._best = Mock(side_effect=RequestFailed("3 ranks failed"))
    answer, found = spans(body={"use_beam_search": True})
    assert answer.status_code == 500
    (generate,) = found["generate"]
    assert generate.status.status_code == StatusCode.ERROR
    assert "gen_ai.request.max_tokens" in generate.attributes
    assert "gen_ai.usage.input_tokens" not in generate.attributes


def test_each_prompt_has_a_span(spans):
    _, found = spans(body={"prompt": ["1 + 1", "1 + 2"]})
    assert len(found["generate"]) == 2
    assert len(found["POST /v1/completions"]) == 1


def test_a_failed_request_has_spans_with_the_error(spans, engine):
    engine.at_token = Mock(side_effect=RequestFailed("3 ranks failed"))
    answer, found = spans()
    assert answer.status_code == 500
    (http,), (generate,) = found["POST /v1/completions"], found["generate"]
    assert http.status.status_code == generate.status.status_code == StatusCode.ERROR
    assert "3 ranks failed" in generate.status.description
    assert "prefill" not in found


def test_requests_without_generation_leave_no_spans(spans):
    spans.client.get("/v1/models")
    spans.client.get("/health")
    assert spans.exporter.get_finished_spans() == ()
