"""Creates the spans of requests and of starts, and sends them. Needs `pip install 'raycore[otel]'`. They are::

    POST /v1/completions                 of a server; part of the caller's trace, if the request's header names one
      generate                           one for each prompt, also of a beam search, which has no phases
        queue, prefill, decode           the phases of the prompt on its rank
          worker step                    the first 128 steps that generated a token for the prompt's first sequence

    POST /v1/embeddings                  and other requests that pool
      encode                             all of its prompts

    engine start                         in a trace of its own
      rank start                         of each rank; alone, if the rank came or was replaced later
        process start, ...               the phases of its engine
        worker start                     of each worker
          process start, load weights, ...

In Python, `generate` and `encode` are parts of the trace that `trace_headers` name, or of the caller's current span.
Ranks return the timings of phases and steps with their outputs. The spans of these are created when a request has
ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from opentelemetry import trace
from opentelemetry.context import Context, get_current
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.watchers import Note, Watcher
from raycore.messages import EngineInfo, StartPhase
from raycore.outputs import RequestOutput
from raycore.parts.traces.client.traces import TraceableEngine, Traces
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.system import threading, time

logger = logging.getLogger(__name__)

FLUSH_S = 5.0
"""How long, in seconds, `stop()` tries to send the remaining spans."""

Attributes = dict[str, str | int | float | tuple[str, ...]]


def start_tracing(endpoint: str) -> TracerProvider:
    """Create a provider that sends spans to an OTLP collector.

    Args:
        endpoint: the collector's URL. If its path is `/v1/traces`, spans are sent over HTTP, otherwise over gRPC.
    """
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
        resource = resource.merge(Resource({"service.name": "raycore"}))
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)  # that one has no time limit
    provider.add_span_processor(BatchSpanProcessor(_exporter_class(endpoint)(endpoint)))
    return provider


def _exporter_class(endpoint: str) -> Callable[[str], SpanExporter]:
    """Return what makes the exporter to a URL. Its packages are separate from those of the rest of this module."""
    if endpoint.rstrip("/").endswith("/v1/traces"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return partial(GrpcExporter, insecure=not endpoint.startswith("https://"))


class SentTraces(Traces):
    """Spans that a provider sends."""

    is_on = True

    def __init__(self, provider: TracerProvider) -> None:
        self.tracer: Tracer = provider.get_tracer("raycore")
        self._provider = provider
        self._pids: set[int] = set()
        """Of the engines of the ranks whose starts have spans."""
        self._stopper = threading.Thread(target=provider.shutdown, name="raycore-last-spans", daemon=True)

    def watch(self, engine: TraceableEngine, model_name: str) -> None:
        engine.trace_requests()
        engine.watch(RequestTraces(self.tracer, model_name))

    def engine_started(self, begun_s: float, infos: Sequence[EngineInfo]) -> None:
        span = self.tracer.start_span("engine start", Context(), start_time=_ns(begun_s))
        span.set_attribute("raycore.num_ranks", len(infos))
        for info in infos:
            self._add_start(info, trace.set_span_in_context(span), begun_s)
        span.end()

    def rank_up(self, info: EngineInfo) -> None:
        self._add_start(info, Context(), 0.0)

    def stop(self) -> None:
        if self._stopper.ident is None:
            self._stopper.start()
        self._stopper.join(FLUSH_S)
        if self._stopper.is_alive():
            logger.warning("the last traces are lost: the collector didn't take them within %g s", FLUSH_S)

    def _add_start(self, info: EngineInfo, parent: Context, since_s: float) -> None:
        """Create the spans of a rank's start. None of them begins before `since_s`, because Ray's processes may."""
        if info.pid in self._pids or not info.phases:
            return  # a rank that had no weights to serve with, and is back
        self._pids.add(info.pid)
        of_rank: Attributes = {"raycore.dp_rank": info.dp_rank, "raycore.node_id": info.node_id}
        within = self._add_phases("rank start", info.phases, parent, since_s, {**of_rank, "process.pid": info.pid})
        begun_s = max(since_s, info.phases[0].begun_s)
        for index, phases in enumerate(info.worker_phases):
            known = [each for each in phases if each.begun_s + each.duration_s > begun_s]  # a standby has older ones
            if known:
                pid = info.worker_pids[index] if index < len(info.worker_pids) else info.pid
                of_worker: Attributes = {"raycore.worker": index, "process.pid": pid}
                self._add_phases("worker start", known, within, begun_s, {**of_rank, **of_worker})

    def _add_phases(
        self, name: str, phases: Sequence[StartPhase], parent: Context, since_s: float, attributes: Attributes
    ) -> Context:
        """Create a span with one for each phase in it. Returns the context of its parts."""
        spans = [(each.name, max(since_s, each.begun_s), each.begun_s + each.duration_s) for each in phases]
        begun_s, ended_s = min(each[1] for each in spans), max(each[2] for each in spans)
        whole = self.tracer.start_span(name, parent, attributes=attributes, start_time=_ns(begun_s))
        within = trace.set_span_in_context(whole)
        for part, part_begun_s, part_ended_s in spans:
            span = self.tracer.start_span(part, within, attributes=attributes, start_time=_ns(part_begun_s))
            span.end(_ns(max(part_begun_s, part_ended_s)))
        whole.end(_ns(ended_s))
        return within


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


class RequestTraces(Watcher):
    """Creates spans for the requests of an engine.

    Each is a child of the span that its `trace_headers` name, or else of the one that is current at its start.
    """

    def __init__(self, tracer: Tracer, model_name: str) -> None:
        self._tracer = tracer
        self._model_name = model_name

    def watching(self, asks: Sequence[Ask]) -> AbstractContextManager[Note]:
        return self._pooling(asks) if isinstance(asks[0].params, PoolingParams) else self._generation(asks[0])

    @contextmanager
    def _generation(self, ask: Ask) -> Generator[Note]:
        last: RequestOutput | None = None

        def note(output: RequestOutput) -> None:
            nonlocal last
            last = output

        with self._span("generate", "text_completion", ask) as span:
            span.set_attributes(_asked(ask.params))
            try:
                yield note
            finally:
                if last is not None:
                    span.set_attributes(_used(last))
                    self._add_phases(span, last)

    @contextmanager
    def _pooling(self, asks: Sequence[Ask]) -> Generator[Note]:
        params = asks[0].params
        with self._span("encode", "embeddings", asks[0]) as span:
            if isinstance(params, PoolingParams) and params.task is not None:
                span.set_attribute("raycore.task", params.task)
            results: list[RequestOutput] = []
            yield results.append
            num_tokens = sum(len(result.prompt_token_ids) for result in results)
            span.set_attributes({"raycore.num_prompts": len(results), "gen_ai.usage.input_tokens": num_tokens})

    @contextmanager
    def _span(self, name: str, operation: str, ask: Ask) -> Generator[Span]:
        """The span of a call, which isn't the current one: calls of one request overlap."""
        model_name = self._model_name if ask.lora is None else ask.lora.lora_name
        headers = {header.lower(): value for header, value in ask.trace_headers.items()}
        span = self._tracer.start_span(name, TraceContextTextMapPropagator().extract(headers, get_current()))
        span.set_attributes({"gen_ai.operation.name": operation, "gen_ai.request.model": model_name})
        try:
            yield span
        except Exception as error:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error).partition("\n")[0]))
            raise
        finally:
            span.end()

    def _add_phases(self, span: Span, output: RequestOutput) -> None:
        """Create the spans of the request's phases and steps. Does nothing if no token was generated."""
        metrics, traced = output.metrics, output.trace
        if traced is None or metrics is None or "first_token_s" not in metrics:
            return
        first_token_s = metrics["first_token_s"]
        begun_s = metrics["arrival_s"] + (traced.queue_s or 0.0)
        ended_s = metrics.get("finished_s", time.monotonic())
        attributes: Attributes = {} if traced.dp_rank is None else {"raycore.dp_rank": traced.dp_rank}
        span.set_attributes(
            {
                **attributes,
                "gen_ai.latency.time_in_queue": traced.queue_s or 0.0,
                "gen_ai.latency.time_to_first_token": first_token_s - metrics["arrival_s"],
                "gen_ai.latency.e2e": ended_s - metrics["arrival_s"],
            }
        )
        parent = trace.set_span_in_context(span)
        self._add("queue", metrics["arrival_s"], begun_s, parent, attributes)
        prefill = self._add("prefill", begun_s, first_token_s, parent, attributes)
        decode = self._add(
            "decode", first_token_s, ended_s, parent, {**attributes, "raycore.num_steps": max(0, traced.num_steps - 1)}
        )
        for begin_s, end_s in traced.steps:
            phase = prefill if end_s <= first_token_s else decode
            self._add("worker step", begin_s, end_s, trace.set_span_in_context(phase), attributes)

    def _add(self, name: str, begin_s: float, end_s: float, parent: Context, attributes: Attributes) -> Span:
        # spans need wall-clock times
        offset_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(name, parent, attributes=attributes, start_time=offset_ns + round(begin_s * 1e9))
        span.end(offset_ns + round(end_s * 1e9))
        return span


def _asked(params: object) -> Attributes:
    asked: Attributes = {}
    if isinstance(params, BeamSearchParams):
        asked = {"raycore.beam_width": params.beam_width}
    elif isinstance(params, SamplingParams):
        asked = {
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
        }
    max_tokens = getattr(params, "max_tokens", None)
    if max_tokens is not None:
        asked["gen_ai.request.max_tokens"] = max_tokens
    return asked


def _used(output: RequestOutput) -> Attributes:
    """The attributes of a finished request. Token counts have both OpenTelemetry's and vLLM's names."""
    num_prompt = len(output.prompt_token_ids)
    num_output = sum(len(completion.token_ids) for completion in output.outputs)
    return {
        "gen_ai.request.id": output.request_id,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.prompt_tokens": num_prompt,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.response.finish_reasons": tuple(each.finish_reason or "abort" for each in output.outputs),
    }
