"""Spans of requests in Python and of starts, as the SDK's in-memory exporter gets them, and the last ones' way out."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest
from answering_client import AnsweringClient, engine
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from raycore import LLM, SamplingParams
from raycore.beam_search import BeamSearchParams
from raycore.errors import RequestFailed
from raycore.messages import EngineInfo, StartPhase
from raycore.parts.traces.client.spans import SentTraces, start_tracing
from raycore.pooling_params import PoolingParams

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
HEADERS = {"Traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
PROMPT = {"prompt_token_ids": [1, 2]}
SHORT = SamplingParams(max_tokens=1)


class Tracing:
    """Traces whose spans stay here."""

    def __init__(self) -> None:
        self.exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.traces = SentTraces(provider)

    def spans(self, name: str) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    def watch(self, client: AnsweringClient) -> None:
        llm = SimpleNamespace(trace_requests=lambda: None, watch=client.watchers.add)
        self.traces.watch(llm, "m")


@pytest.fixture
def tracing() -> Tracing:
    return Tracing()


def blocking(client: AnsweringClient) -> LLM:
    llm = object.__new__(LLM)
    llm._client = client  # pyright: ignore
    client.num_output_tokens = 0
    client.checks.pooling = SimpleNamespace(tasks=("embed",))
    llm.config = SimpleNamespace(model=SimpleNamespace(default_sampling_params={}))  # pyright: ignore
    return llm


async def last(outputs: Any) -> Any:
    async with aclosing(outputs):
        return [each async for each in outputs][-1]


@pytest.mark.parametrize("way", ["generate", "add_request", "encode"])
def test_headers_name_the_span_that_a_requests_are_parts_of(tracing, tokenizer, way):
    client = AnsweringClient(tokenizer)
    tracing.watch(client)
    llm = engine(client)

    async def ask() -> None:
        if way == "generate":
            await last(llm.generate(PROMPT, SHORT, trace_headers=HEADERS))
        elif way == "encode":
            await last(llm.encode(PROMPT, PoolingParams(task="embed"), trace_headers=HEADERS))
        else:
            await (await llm.add_request("a", PROMPT, SHORT, trace_headers=HEADERS)).get()

    asyncio.run(ask())
    (span,) = tracing.spans("encode" if way == "encode" else "generate")
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    assert span.attributes["gen_ai.request.model"] == "m"
    assert span.attributes["gen_ai.usage.input_tokens"] == 2


def test_without_headers_they_are_parts_of_the_current_span(tracing, tokenizer):
    client = AnsweringClient(tokenizer)
    tracing.watch(client)
    with tracing.traces.tracer.start_as_current_span("mine") as mine:
        blocking(client).generate([PROMPT, PROMPT], SHORT, use_tqdm=False)
    generated = tracing.spans("generate")
    assert [span.parent.span_id for span in generated] == [mine.get_span_context().span_id] * 2
    assert {span.attributes["gen_ai.usage.output_tokens"] for span in generated} == {1}
    assert not trace.get_current_span().get_span_context().is_valid


def test_each_blocking_call_has_spans(tracing, tokenizer):
    client = AnsweringClient(tokenizer)
    tracing.watch(client)
    llm = blocking(client)
    list(llm.stream(PROMPT, SHORT))
    llm.enqueue(PROMPT, SHORT, use_tqdm=False)
    llm.wait_for_completion(use_tqdm=False)
    assert len(tracing.spans("generate")) == 2
    llm.encode([PROMPT, PROMPT], PoolingParams(task="embed"), use_tqdm=False)
    (encode,) = tracing.spans("encode")
    assert encode.attributes["raycore.num_prompts"] == 2


def test_a_beam_search_has_one_span(tracing, tokenizer):
    client = AnsweringClient(tokenizer)
    tracing.watch(client)
    blocking(client).beam_search([PROMPT, PROMPT], BeamSearchParams(1, 3))
    spans = tracing.spans("generate")
    assert [span.attributes["raycore.beam_width"] for span in spans] == [1, 1]
    assert all(span.attributes["gen_ai.usage.output_tokens"] > 0 for span in spans)


def test_the_span_of_a_blocking_call_that_fails_has_the_error(tracing, tokenizer):
    client = AnsweringClient(tokenizer, RequestFailed("3 ranks failed"))
    tracing.watch(client)
    with pytest.raises(RequestFailed):
        blocking(client).generate(PROMPT, SHORT, use_tqdm=False)
    (span,) = tracing.spans("generate")
    assert span.status.status_code == StatusCode.ERROR
    assert "3 ranks failed" in span.status.description


def info(dp_rank: int, pid: int, phases: list[StartPhase], workers: list[list[StartPhase]]) -> EngineInfo:
    pids = [pid + 1 + index for index in range(len(workers))]
    return EngineInfo(dp_rank, pid, "node", 1, 16, 64, "float32", {}, pids, phases=phases, worker_phases=workers)


def seconds(span: Any) -> tuple[float, float]:
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_start_has_spans_of_ranks_and_workers(tracing):
    begun_s = time.time() - 20.0
    rank = [StartPhase("process start", begun_s - 5, 6), StartPhase("workers and weights", begun_s + 1, 8)]
    worker = [StartPhase("process start", begun_s + 1, 2), StartPhase("load weights", begun_s + 3, 6)]
    infos = [info(0, 10, rank, [worker, worker]), info(1, 20, rank, [worker])]
    tracing.traces.engine_started(begun_s, infos)
    (whole,) = tracing.spans("engine start")
    assert whole.parent is None
    assert seconds(whole) == pytest.approx((begun_s, time.time()), abs=5)
    ranks = tracing.spans("rank start")
    assert [span.attributes["raycore.dp_rank"] for span in ranks] == [0, 1]
    assert {span.parent.span_id for span in ranks} == {whole.context.span_id}
    # Ray may have started the process long before
    assert seconds(ranks[0]) == pytest.approx((begun_s, begun_s + 9), abs=1e-3)
    workers = tracing.spans("worker start")
    assert [(span.attributes["raycore.worker"], span.attributes["process.pid"]) for span in workers] == [
        *((0, 11), (1, 12)),
        (0, 21),
    ]
    assert workers[2].parent.span_id == ranks[1].context.span_id
    loads = tracing.spans("load weights")
    assert [span.parent.span_id for span in loads] == [span.context.span_id for span in workers]
    assert seconds(loads[0]) == pytest.approx((begun_s + 3, begun_s + 9), abs=1e-3)
    for each in infos:
        tracing.traces.rank_up(each)
    assert len(tracing.spans("rank start")) == 2


def test_a_rank_that_comes_later_has_a_trace_of_its_own(tracing):
    now_s = time.time()
    phases = [StartPhase("workers and weights", now_s - 2, 2)]
    worker = [StartPhase("process start", now_s - 60, 3), StartPhase("load weights", now_s - 2, 1)]
    tracing.traces.rank_up(info(0, 10, phases, [worker]))
    tracing.traces.rank_up(info(0, 10, phases, [worker]))  # back in service
    (rank,) = tracing.spans("rank start")
    assert rank.parent is None
    assert tracing.spans("process start") == []  # of a standby's worker, which was nobody's then
    assert len(tracing.spans("load weights")) == 1


@pytest.mark.parametrize(("path", "protocol"), [("/v1/traces", "http"), ("", "grpc")])
def test_the_url_chooses_http_or_grpc_and_the_end_sends_what_is_left(monkeypatch, path, protocol):
    made: list[str] = []
    sent: list[str] = []
    exporter = f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter.OTLPSpanExporter"
    monkeypatch.setattr(f"{exporter}.__init__", lambda self, endpoint, **_: made.append(endpoint))
    monkeypatch.setattr(f"{exporter}.export", lambda self, spans: sent.extend(span.name for span in spans))
    monkeypatch.setattr(f"{exporter}.shutdown", lambda self, *_, **__: None)
    endpoint = f"http://localhost:1{path}"
    traces = SentTraces(start_tracing(endpoint))
    traces.engine_started(time.time(), [])
    traces.stop()
    assert (made, sent) == ([endpoint], ["engine start"])
