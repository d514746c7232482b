"""OpenTelemetry traces of requests. Needs `pip install 'raycore[otel]'`. The spans of a request are::

    POST /v1/completions                 part of the caller's trace, if the request's header names one
      generate                           one for each prompt, also of a beam search, which has no phases
        queue, prefill, decode           the phases of the prompt on its rank
          worker step                    the first 128 steps that generated a token for the prompt's first sequence

    POST /v1/embeddings                  and other requests that pool
      encode                             all of its prompts

Ranks return the timings of phases and steps with their outputs. The spans of these are created when a request has
ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Protocol

from fastapi import FastAPI
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.watchers import Note, Watcher
from raycore.outputs import RequestOutput
from raycore.parts.adapters.server.adapters import AdapterSource
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.server.app import build_app
from raycore.server.contract.engine import ServingEngine
from raycore.server.dialects.responses.store import ResponseStore
from raycore.server.endpoints import Rule, path_of, paths_with
from raycore.server.options import ServerOptions

_TRACED_PATHS = frozenset(paths_with(Rule.TRACED))


class TraceableEngine(ServingEngine, Protocol):
    """An engine, such as `AsyncLLM`, whose outputs can include timings (`RequestOutput.trace`)."""

    def trace_requests(self) -> None:
        """Include timings in the outputs of all requests submitted from now on."""
        ...


Attributes = dict[str, str | int | float | tuple[str, ...]]


def start_tracing(endpoint: str) -> TracerProvider:
    """Create a provider that sends spans to an OTLP collector. The provider's `shutdown()` sends the remaining spans.

    Args:
        endpoint: the collector's URL. If its path is `/v1/traces`, spans are sent over HTTP, otherwise over gRPC.
    """
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):  # OTEL_SERVICE_NAME is not set
        resource = resource.merge(Resource({"service.name": "raycore"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(exporter_class(endpoint)(endpoint)))
    return provider


def exporter_class(endpoint: str) -> Callable[[str], SpanExporter]:
    """Return what makes the exporter to a URL. Its packages are separate from those of the rest of this module."""
    if endpoint.rstrip("/").endswith("/v1/traces"):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

    return partial(GrpcExporter, insecure=not endpoint.startswith("https://"))


def build_traced_app(
    engine: TraceableEngine,
    options: ServerOptions,
    provider: TracerProvider,
    adapters: AdapterSource | None = None,
    response_store: ResponseStore | None = None,
) -> FastAPI:
    """Build the application. Its requests create spans, which `provider` exports. The rest is as for `build_app`."""
    tracer = provider.get_tracer("raycore")
    engine.trace_requests()
    engine.watch(RequestTraces(tracer, options.served_model_names[0]))
    app = build_app(engine, options, adapters, response_store)
    app.add_middleware(TraceRequests, tracer=tracer)
    return app


class TraceRequests:
    """ASGI middleware that creates a span for each request to the model.

    The span belongs to the trace that the request's `traceparent` header names, or else to a new trace.
    """

    def __init__(self, app: ASGIApp, tracer: Tracer) -> None:
        self._app = app
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = path_of(scope) if scope["type"] == "http" else ""
        if path not in _TRACED_PATHS:
            await self._app(scope, receive, send)
            return
        context = TraceContextTextMapPropagator().extract(dict(Headers(scope=scope)))
        attributes = {"http.request.method": scope["method"], "http.route": path}
        name = f"{scope['method']} {path}"
        with self._tracer.start_as_current_span(name, context, SpanKind.SERVER, attributes) as span:

            async def watching(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, watching)


class RequestTraces(Watcher):
    """Creates spans for the requests of an engine. Each is a child of the span that is current at its start."""

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
        span = self._tracer.start_span(name)
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
