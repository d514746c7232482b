"""`raycore serve`: OpenAI's API over a model. Flags are vLLM's."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from raycore.cli.engine_options import add_chat_options, add_engine_options, engine_options
from raycore.errors import InvalidConfig

if TYPE_CHECKING:
    from fastapi import FastAPI
    from opentelemetry.sdk.trace import TracerProvider

    from raycore.llm import AsyncLLM
    from raycore.server import ServerOptions
    from raycore.server.options import TraceOptions

DEFAULT_PORT = 8000


def add_serve_command(commands: Any) -> None:
    """Add `serve` to the command line."""
    command = commands.add_parser(
        "serve", help="serve OpenAI's API", description="Serve OpenAI's API until SIGTERM or Ctrl-C."
    )
    command.set_defaults(command=_serve)
    command.add_argument("model", nargs="?", metavar="MODEL", help="a checkpoint; default: the bundled model")
    command.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1, this machine only")
    command.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"default: {DEFAULT_PORT}; 0 takes a free one")
    command.add_argument(
        "--served-model-name", nargs="+", default=None, metavar="NAME", help="default: the model's path"
    )
    command.add_argument(
        "--api-key", nargs="+", default=None, metavar="KEY", help="clients need one of these; also RAYCORE_API_KEY"
    )
    add_chat_options(command)
    command.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="S", help="seconds to finish in after SIGTERM or Ctrl-C"
    )
    command.add_argument(
        "--max-concurrent-requests", type=int, default=4096, metavar="N", help="further ones get a 429"
    )
    command.add_argument(
        "--max-body-bytes", type=int, default=4 << 20, metavar="N", help="of a request; default: 4194304"
    )
    command.add_argument("--max-logprobs", type=int, default=20, metavar="N", help="for each token; default: 20")
    command.add_argument(
        "--otlp-traces-endpoint", default=None, metavar="URL", help="send OpenTelemetry traces there; default: none"
    )
    command.add_argument(
        "--disable-log-stats", action="store_true", help="no line in the log every 10 s of what the ranks do"
    )
    command.add_argument(
        "--api-server-count", type=int, default=1, metavar="N", help="processes that serve the port; default: 1"
    )
    add_engine_options(command)


def _serve(args: argparse.Namespace) -> int:
    # imported late so that `raycore --help` answers at once
    try:
        from raycore.server import ServerOptions
        from raycore.server.multi_process.api_servers import MAX_API_SERVERS, APIServers
        from raycore.server.options import read_chat_template
        from raycore.server.serving import HttpServer, listen, prepare_process, reserve, serve
    except ModuleNotFoundError as error:
        raise InvalidConfig(f"{error.name} is missing: pip install 'raycore[serve]'") from error
    from raycore.demo import demo_model_path
    from raycore.llm import AsyncLLM
    from raycore.metrics.throughput_log import throughput_logged

    count = args.api_server_count
    if not 1 <= count <= MAX_API_SERVERS:
        raise InvalidConfig(f"api_server_count={count} is not in [1, {MAX_API_SERVERS}]")
    chosen = engine_options(args)
    model = args.model or str(demo_model_path())
    options = ServerOptions(
        served_model_names=tuple(args.served_model_name or [model]),
        api_keys=tuple(args.api_key or [key for key in [os.environ.get("RAYCORE_API_KEY")] if key]),
        chat_template=read_chat_template(args.chat_template),
        trust_request_chat_template=args.trust_request_chat_template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        max_body_bytes=args.max_body_bytes,
        max_logprobs=args.max_logprobs,
        max_streams=args.max_concurrent_requests,
    )
    traces = _trace_options(args.otlp_traces_endpoint)
    if not (logger := logging.getLogger("raycore")).isEnabledFor(logging.INFO):
        logger.setLevel(logging.INFO)
    try:
        listener = listen(args.host, args.port) if count == 1 else reserve(args.host, args.port)
    except OSError as error:
        raise InvalidConfig(f"can't listen on {args.host}:{args.port}: {error.strerror or error}") from error
    with listener, _tracing(traces if count == 1 else None) as tracing:
        engine = AsyncLLM(model, use_tqdm_on_load=sys.stderr.isatty(), **chosen)
        try:
            host, port = listener.getsockname()[:2]
            prepare_process()
            server = (
                HttpServer(_app(engine, options, tracing), listener)
                if count == 1
                else APIServers(engine, options, host, port, count, traces)
            )
            where = f"{options.served_model_names[0]} on http://{host}:{port}"
            with throughput_logged(engine.read_metrics, is_wanted=not args.disable_log_stats):
                ended_by = serve(engine, server, args.shutdown_timeout, lambda: _say(f"serving {where}"))
        finally:
            engine.shutdown()
    _say(f"ended by {ended_by or 'a shutdown'}, with nothing left to do")
    return 0


def _say(text: str) -> None:
    print(f"raycore: {text}", file=sys.stderr, flush=True)


def _trace_options(endpoint: str | None) -> TraceOptions | None:
    """Raises InvalidConfig if it is no URL, or the packages are missing."""
    if endpoint is None:
        return None
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidConfig(f"--otlp-traces-endpoint {endpoint}: give a URL, such as http://localhost:4317")
    try:
        importlib.import_module("raycore.server.tracing")  # here, where whoever asks sees it
    except ModuleNotFoundError as error:
        raise InvalidConfig(f"{error.name} is missing: pip install 'raycore[otel]'") from error
    from raycore.server.options import TraceOptions

    return TraceOptions(endpoint, {name: value for name, value in os.environ.items() if name.startswith("OTEL_")})


@contextmanager
def _tracing(traces: TraceOptions | None) -> Generator[TracerProvider | None, None, None]:
    """What takes this process's spans and sends them, if they are wanted: the last of them when the block ends."""
    if traces is None:
        yield None
        return
    from raycore.server.tracing import start_tracing

    provider = start_tracing(traces.endpoint)
    try:
        yield provider
    finally:
        provider.shutdown()


def _app(engine: AsyncLLM, options: ServerOptions, tracing: TracerProvider | None) -> FastAPI:
    if tracing is None:
        from raycore.server import build_app

        return build_app(engine, options)
    from raycore.server.tracing import build_traced_app

    return build_traced_app(engine, options, tracing)
