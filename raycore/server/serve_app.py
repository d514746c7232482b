"""The OpenAI API under Ray Serve: each replica starts an engine and serves the application of `build_app`.

In a Serve configuration, set `import_path: raycore.server.serve_app:build_serve_app` and put the builder's arguments
under `args`. On the command line: `serve run raycore.server.serve_app:build_serve_app model=DIR`. Needs
`pip install 'raycore[ray-serve]'`. A replica reserves no CPU, because it only forwards requests to the engine's ranks,
which reserve CPUs themselves.
"""

# ray's own types are partial:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedClassDecorator=false

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from ray import serve

from placement.topology import read_cluster
from raycore.config import ENGINE_OPTIONS
from raycore.config.vllm_table import VLLM_OPTIONS, without_vllm_options
from raycore.demo import demo_model_path
from raycore.errors import EngineDeadError, InvalidConfig
from raycore.llm import AsyncLLM
from raycore.options.declared import check_options
from raycore.parts.adapters.server.adapters import OfferedAdapters, check_adapters, load_adapters
from raycore.parts.constraints.config.structured_outputs import parsers_of
from raycore.ray_api import FromDriversCopy, is_connected
from raycore.server.app import build_app
from raycore.server.options import (
    SERVER_OPTIONS,
    ServerOptions,
    api_keys_of_environment,
    check_enable_lora,
    server_options,
)
from raycore.server.process.serving import prepare_process
from raycore.short_tracebacks import ends_traceback

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 60.0
"""Seconds that a stopping replica has to finish its requests. The pod's termination grace period must be longer."""

_HEALTH_CHECK_PERIOD_S = 5.0

_MAX_STARTS = 3
"""How often Serve tries to start a replica. With Serve's default, a model that can't run would be loaded 20 times."""


DEPLOYMENT: dict[str, Any] = {
    "ray_actor_options": {"num_cpus": 0},
    "graceful_shutdown_timeout_s": DRAIN_TIMEOUT_S,
    "health_check_period_s": _HEALTH_CHECK_PERIOD_S,
    "max_constructor_retry_count": _MAX_STARTS,
}
"""Serve's options for deployments that host engines."""

ARGUMENTS = {**ENGINE_OPTIONS, **{name: each for name, each in SERVER_OPTIONS.items() if not each.is_secret}}
"""The builder's arguments: all engine and server options except API keys, which don't belong in manifests."""


@ends_traceback
def build_serve_app(args: dict[str, Any]) -> serve.Application:
    """Build a Serve application with one deployment, `raycore`.

    Args:
        args: options, as docs/options.md lists them, as text (`dtype=float32` on the command line) or as typed
            values. The API key is read from RAYCORE_API_KEY in the replicas' environment.

    Raises:
        InvalidConfig: an option is unknown or invalid.
    """
    given = {name: _value(name, arg) for name, arg in args.items()}
    own = {name: value for name, value in given.items() if name in ARGUMENTS}
    others = {name: value for name, value in given.items() if name not in ARGUMENTS}
    chosen = check_options(ARGUMENTS, own | without_vllm_options(others))
    check_model_path("model", chosen.get("model"))
    adapters = {name: chosen.get(name) or () for name in ("lora_modules", "allowed_lora_directories")}
    check_enable_lora(bool(chosen.get("enable_lora")), **adapters)
    server = {name: value for name, value in chosen.items() if name in SERVER_OPTIONS}
    engine = {name: value for name, value in chosen.items() if name in ENGINE_OPTIONS}
    # with this limit, Serve queues the requests that the server would otherwise refuse with status 429
    deployment: Any = Raycore
    limit = chosen.get("max_concurrent_requests") or SERVER_OPTIONS["max_concurrent_requests"].default
    return deployment.options(max_ongoing_requests=limit).bind(server, engine)


def check_model_path(name: str, path: object) -> None:
    """Say at once that a checkpoint's path is missing. Serve would start replicas three times, and log each failure.

    The path has to be on the replicas' nodes, which this machine may not be one of. Names on the hub aren't looked for.

    Args:
        name: what the caller knows the path as, for messages.

    Raises:
        InvalidConfig: there is no such path on this machine, which is the only node of its Ray cluster.
    """
    if not isinstance(path, str | os.PathLike):
        return
    expanded = Path(path).expanduser()
    if not (expanded.is_absolute() or str(path).startswith(".")) or expanded.exists():
        return
    if is_connected() and sum(node.alive for node in read_cluster().nodes) == 1:
        raise InvalidConfig(
            f"{name}={str(path)!r} doesn't exist: give the directory of a downloaded checkpoint, or a .gguf file"
        )
    logger.warning("%s=%r doesn't exist on this machine: it has to on the nodes of the replicas", name, str(path))


def _value(name: str, given: Any) -> Any:
    if not isinstance(given, str):
        return given
    if name in ARGUMENTS:
        return ARGUMENTS[name].parse(given)
    return VLLM_OPTIONS[name].parse(given) if name in VLLM_OPTIONS else given


def late_ingress(plain: type[Any]) -> Any:
    """Have each replica serve what its `__serve_build_asgi_app__` returns after its `__init__`, as `serve.ingress()`
    does.

    Before Ray 2.56, `serve.ingress` needs the application itself. It gets an empty one, which the replica replaces.
    """
    if inspect.signature(serve.ingress).parameters["app"].default is None:
        return serve.ingress()(plain)
    from ray.serve._private.http_util import ASGIAppReplicaWrapper

    with_empty_app: Any = serve.ingress(lambda: FastAPI())(plain)

    class WithLateApp(with_empty_app):
        async def __init__(self, *args: Any, **options: Any) -> None:
            await super().__init__(*args, **options)
            ASGIAppReplicaWrapper.__init__(self, self.__serve_build_asgi_app__())

    return WithLateApp


@ends_traceback  # Serve logs it, several times
async def start_engine(
    server: dict[str, Any], engine: dict[str, Any], make: type[AsyncLLM] = AsyncLLM
) -> tuple[AsyncLLM, ServerOptions, OfferedAdapters]:
    """Start a replica's engine, and return once it can serve: the engine, its server's options and its adapters.

    Args:
        server: arguments of the server.
        engine: arguments of the engine.
        make: the engine's class.

    Raises:
        InvalidConfig, InvalidCheckpoint, PlacementShortage, InitializationError: those of `AsyncLLM`.
    """
    if engine.get("engine_name") is not None:  # replicas are engines, whose names must differ within a cluster
        engine = {**engine, "engine_name": f"{engine['engine_name']}-{own_replica_id()}"}
    parsers = parsers_of(engine.get("structured_outputs_config"))
    options = server_options(engine["model"], {"api_key": api_keys_of_environment(), **parsers, **server})
    await asyncio.to_thread(check_adapters, engine, options)
    # loading a model can take minutes, during which the event loop must stay free for Serve's calls
    llm = await make.create(use_tqdm_on_load=False, **engine)
    prepare_process()
    try:
        return llm, options, await load_adapters(llm, options)
    except BaseException:
        await asyncio.to_thread(llm.shutdown)
        raise


def own_replica_id() -> str:
    """The id of the replica that runs in this process."""
    return serve.get_replica_context().replica_id.unique_id


def check_engine(engine: AsyncLLM) -> None:
    """Raise EngineDeadError if the engine refuses requests."""
    unavailable_reason = engine.unavailable_reason
    if unavailable_reason is not None:
        raise EngineDeadError(unavailable_reason)


@serve.deployment(name="raycore", **DEPLOYMENT)
@late_ingress
class Raycore(FromDriversCopy):
    """A replica: an engine and its server. To stop a replica, Serve drains it and then calls `__del__`."""

    async def __init__(self, server: dict[str, Any], engine: dict[str, Any]) -> None:
        """Start the engine with arguments that `build_serve_app` has checked, and return once it can serve."""
        engine = {"model": str(demo_model_path()), **engine}
        self._engine, self._options, self._adapters = await start_engine(server, engine)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return build_app(self._engine, self._options, self._adapters, returns_request_ids=False)

    def check_health(self) -> None:
        """Raise EngineDeadError if the engine refuses requests. Serve then replaces the replica."""
        check_engine(self._engine)

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.shutdown)
