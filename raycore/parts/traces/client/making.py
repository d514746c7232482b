"""Makes what creates an engine's spans. OpenTelemetry is imported only if they are asked for."""

from __future__ import annotations

from raycore.extras import needing
from raycore.parts.traces.client.traces import NO_TRACES, Traces
from raycore.parts.traces.config import TracesConfig


def make_traces(config: TracesConfig) -> Traces:
    """Make what creates an engine's spans.

    Raises:
        MissingPackage: a package that sends them isn't installed.
    """
    if config.otlp_traces_endpoint is None:
        return NO_TRACES
    with needing("otlp_traces_endpoint needs", "otel"):
        from raycore.parts.traces.client.spans import SentTraces, start_tracing

        return SentTraces(start_tracing(config.otlp_traces_endpoint))
