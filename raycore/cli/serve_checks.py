"""What `raycore serve` checks before an engine starts, which can take minutes."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from raycore.cli.engine_options import chosen_engine_options, chosen_listen_options, chosen_server_options
from raycore.errors import InvalidConfig
from raycore.extras import needing
from raycore.server.listen_options import ListenOptions
from raycore.server.options import ServerOptions, api_keys_of_environment, check_enable_lora


class Chosen(NamedTuple):
    """What the arguments say of a server."""

    engine: dict[str, Any]
    """Keyword arguments of `LLM`."""
    server: ServerOptions
    address: ListenOptions


def check_server(args: argparse.Namespace) -> Chosen:
    """Return what the arguments of a server say. Raises InvalidConfig if it could never start with them."""
    # imported lazily to keep `raycore --help` fast
    with needing("`raycore serve` needs", "serve"):
        from raycore.server.middleware.added import find_middleware
        from raycore.server.multi_process.api_servers import MAX_API_SERVERS
        from raycore.server.process.tls import check_certificates
    from raycore.parts.adapters.server.adapters import check_adapters

    count = args.api_server_count
    if not 1 <= count <= MAX_API_SERVERS:
        raise InvalidConfig(f"api_server_count={count} isn't in [1, {MAX_API_SERVERS}]")
    engine = chosen_engine_options(args)
    server = chosen_server_options(args, engine["model"], api_key=api_keys_of_environment())
    check_enable_lora(bool(engine.get("enable_lora")), server.lora_modules, server.allowed_lora_directories)
    check_adapters(engine, server)
    address = chosen_listen_options(args)
    if args.api_server_nodes == "all":
        _check_other_nodes(address)
    check_certificates(address)
    for path in server.http.middleware:
        find_middleware(path)
    return Chosen(engine, server, address)


def _check_other_nodes(address: ListenOptions) -> None:
    if address.uds is not None:
        raise InvalidConfig(f"--api-server-nodes all: the socket uds={address.uds!r} is on one node: give a port")
    if address.host not in ("0.0.0.0", "::"):
        raise InvalidConfig(
            f"--api-server-nodes all: host={address.host} is an address of one node: give --host 0.0.0.0 or ::"
        )
    if address.port == 0:
        raise InvalidConfig("--api-server-nodes all: port=0 would be another port on each node: give a number")


def check_headless(args: argparse.Namespace) -> dict[str, Any]:
    """Return the engine options of a node without a server. Raises InvalidConfig if there can't be such a node."""
    if args.api_server_count > 1:
        raise InvalidConfig(f"--api-server-count {args.api_server_count}: with --headless, no server runs here")
    if args.api_server_nodes != "own":
        raise InvalidConfig(
            f"--api-server-nodes {args.api_server_nodes}: give it to the server, which starts processes on nodes with "
            "--headless, too"
        )
    engine = chosen_engine_options(args)
    if engine.get("data_parallel_hybrid_lb") or engine.get("data_parallel_rank") is not None:
        raise InvalidConfig(
            "--headless: with --data-parallel-hybrid-lb or --data-parallel-rank, each node has a server: omit it"
        )
    return engine
