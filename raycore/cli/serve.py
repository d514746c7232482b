"""`raycore serve`: an OpenAI-compatible server. Flags have vLLM's names."""

from __future__ import annotations

import argparse
import logging
import sys
from contextlib import nullcontext
from typing import Any

import msgspec

from raycore.cli.engine_options import (
    add_engine_options,
    add_listen_options,
    add_model_argument,
    add_server_options,
)
from raycore.cli.parser import Parser
from raycore.cli.serve_checks import check_headless, check_server
from raycore.config import ENGINE_OPTIONS
from raycore.extras import needing
from raycore.node.threads import run_apart

_DISABLE_LOG_STATS = "--disable-log-stats"


def add_serve_command(commands: Any) -> None:
    """Add `serve` to the command line."""
    command: Parser = commands.add_parser(
        "serve",
        help="serve the OpenAI API",
        description="Serve a model with the OpenAI API until SIGTERM, SIGINT or SIGHUP.",
        usage="raycore serve [MODEL] [FLAG]...",
    )
    command.set_defaults(command=_serve, is_server=True)
    add_model_argument(command)
    group = command.add_argument_group("Program")
    group.add_argument(
        "-asc",
        "--api-server-count",
        type=int,
        default=1,
        metavar="N",
        help="Number of server processes on a machine that share the port. Default: 1.",
    )
    group.add_argument(
        "--api-server-nodes",
        choices=["own", "all"],
        default="own",
        help="Where server processes are. own: on this machine. all: on each node of the Ray cluster, on the same "
        "port, behind a load balancer. Default: own.",
    )
    group.add_argument(
        "--headless",
        action="store_true",
        help="Start no server and no engine here: Ray starts the ranks on all nodes. Wait for the engine of a server "
        "in the same Ray cluster, and end when it has ended.",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="Seconds that running requests have to finish after SIGTERM, SIGINT or SIGHUP. Then they are aborted. "
        "Default: 30.",
    )
    group.add_argument(
        _DISABLE_LOG_STATS, action="store_true", help="Do not log the throughput of busy ranks every 10 seconds."
    )
    add_listen_options(command)
    add_server_options(command, has_http=True)
    add_engine_options(command, without=[_DISABLE_LOG_STATS])


def _serve(args: argparse.Namespace) -> int:
    if args.headless:
        return _follow(args)
    # imported lazily to keep `raycore --help` fast
    with needing("`raycore serve` needs", "serve"):
        from raycore.server import build_app
        from raycore.server.multi_process.api_servers import APIServers
        from raycore.server.process.connection_log import configure_logging
        from raycore.server.process.listening import handed_over, listening, shown_address
        from raycore.server.process.loading import answering_while_loading
        from raycore.server.process.serving import HttpServer, prepare_process, serve
    from raycore.cluster.engine_start import EngineStart
    from raycore.llm import AsyncLLM
    from raycore.metrics.throughput_log import throughput_logged
    from raycore.parts.adapters.server.adapters import load_adapters

    chosen, options, address = check_server(args)
    count, on_all_nodes = args.api_server_count, args.api_server_nodes == "all"
    is_shared = count > 1 or on_all_nodes
    if args.log_level is None:
        logging.getLogger("raycore").setLevel(logging.INFO)
    if address.log_config_file is not None:
        configure_logging(address.log_config_file)
    start = EngineStart()
    with (
        listening(address, is_shared=is_shared) as listener,
        answering_while_loading(start, listener, address, is_shared=is_shared, http=options.http) as loading,
        handed_over(listener) if is_shared and address.uds is not None else nullcontext() as handed_at,
    ):
        engine = AsyncLLM(use_tqdm_on_load=sys.stderr.isatty(), _start=start, **chosen)
        try:
            where = f"{options.served_model_names[0]} on {shown_address(address, listener)}"
            if address.uds is None:
                host, port = listener.getsockname()[:2]
                address = msgspec.structs.replace(address, host=host, port=port)
            prepare_process()
            adapters = run_apart(load_adapters(engine, options))  # callers may have an event loop
            if not is_shared:
                loading.stop()  # the two would share a socket, whose backlog keeps the connections that come meanwhile
                server = HttpServer(build_app(engine, options, adapters), listener, address)
            else:
                server = APIServers(engine, options, adapters, address, count, handed_at, on_all_nodes=on_all_nodes)

            def on_serving() -> None:
                loading.stop()
                _say(f"serving {where}")

            with throughput_logged(engine.read_metrics, is_wanted=not args.disable_log_stats):
                ended_by = serve(engine, server, args.shutdown_timeout, on_serving)
        finally:
            engine.shutdown()
    _say("ended by a shutdown" if ended_by is None else f"ended by {ended_by}: all requests finished or were aborted")
    return 0


def _follow(args: argparse.Namespace) -> int:
    """Do what `--headless` says. Returns the exit status."""
    from raycore.cli.headless import follow

    chosen = check_headless(args)
    option = ENGINE_OPTIONS["init_timeout_s"]
    follow(chosen["model"], chosen.get(option.name, option.default))
    return 0


def _say(text: str) -> None:
    print(f"raycore: {text}", file=sys.stderr, flush=True)
