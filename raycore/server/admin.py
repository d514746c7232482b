"""Paths that are served only with the option `enable_admin_endpoints`, such as those that control the engine.

Paths, query parameters and responses are vLLM's. The parameters of a path that makes a call on the engine are those of
the call. Other paths have handlers of their own.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import Parameter
from types import NoneType
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query
from pydantic import BaseModel, ConfigDict, create_model
from starlette.datastructures import State
from starlette.responses import Response

from raycore.control.calls import AsyncCalls, EngineCalls
from raycore.errors import PlacementShortage
from raycore.node.versions import hardware, versions
from raycore.parts.adapters.server.adapters import LoadsAdapters
from raycore.server.endpoints import Endpoint
from raycore.server.errors import APIError
from raycore.server.generation import ServingEngine
from raycore.server.http_counts import SLEEP_MODE
from raycore.server.openapi.document import responses
from raycore.server.openapi.response_models import (
    Aborted,
    Paused,
    RpcResults,
    Scaling,
    ServerInfo,
    Sleeping,
    SleepStatus,
    Status,
    Success,
    Told,
    WakeStatus,
)
from raycore.server.protocol import (
    AbortRequest,
    CollectiveRpcRequest,
    LoadLoraAdapterRequest,
    ScaleRequest,
    UnloadLoraAdapterRequest,
)
from raycore.server.streaming import JSON

_ERRORS = (400, 401, 500, 503)
_BODY_ERRORS = (408, 413, *_ERRORS)

Arguments = Mapping[str, object]


@dataclass(frozen=True)
class _Call:
    """A path that makes a call on the engine. The first paragraph of the call's docstring describes it."""

    endpoint: Endpoint
    call: Callable[..., Any]
    model: type[BaseModel] | None = None
    """The response. None: it is empty."""
    respond: Callable[[object, Arguments], dict[str, object]] = lambda result, asked: {}
    """Makes the response from the call's result and arguments."""
    has_body: bool = False
    """Whether the arguments are in an optional JSON object, not in the query."""
    operation: str | None = None
    """Its name in the metrics of the sleep mode. None: it isn't one of its operations."""


def _awake(is_awake: object, asked: Arguments) -> dict[str, object]:
    return {"status": "awake" if is_awake else "sleeping", "tags": asked["tags"]}


_CALLS: tuple[_Call, ...] = (
    _Call(Endpoint.PAUSE, EngineCalls.pause_generation, Status, lambda result, asked: {"status": "paused"}),
    _Call(Endpoint.RESUME, EngineCalls.resume_generation, Status, lambda result, asked: {"status": "resumed"}),
    _Call(Endpoint.IS_PAUSED, EngineCalls.is_paused, Paused, lambda result, asked: {"is_paused": result}),
    _Call(
        Endpoint.SLEEP,
        EngineCalls.sleep,
        SleepStatus,
        lambda _, asked: {"status": "sleeping", "level": asked["level"]},
        operation="sleep",
    ),
    _Call(Endpoint.WAKE_UP, EngineCalls.wake_up, WakeStatus, _awake, operation="wake"),
    _Call(Endpoint.IS_SLEEPING, EngineCalls.is_sleeping, Sleeping, lambda result, asked: {"is_sleeping": result}),
    _Call(
        Endpoint.RESET_PREFIX_CACHE, EngineCalls.reset_prefix_cache, Success, lambda result, asked: {"success": result}
    ),
    _Call(Endpoint.RESET_MM_CACHE, EngineCalls.reset_mm_cache),
    _Call(Endpoint.RESET_ENCODER_CACHE, EngineCalls.reset_encoder_cache),
    _Call(Endpoint.START_PROFILE, EngineCalls.start_profile, has_body=True),
    _Call(Endpoint.STOP_PROFILE, EngineCalls.stop_profile),
)

_QUERY = {"level": Query(ge=0, le=2), "reset_connector": Query(alias="reset_external")}
"""What the query has of parameters that is not in their types. The second name is vLLM's."""


def add_admin_endpoints(app: FastAPI, engine: AsyncCalls) -> None:
    """Add the paths to the application."""
    for each in _CALLS:
        description = inspect.cleandoc(each.call.__doc__ or "").split("\n\n")[0]
        described: dict[str, Any] = {"description": description, "responses": responses(each.model, *_ERRORS)}
        if each.model is None:
            described["response_class"] = Response  # not JSON: the body is empty
        each.endpoint.route(app, **described)(_handler(each, engine, app.state))


def _handler(each: _Call, engine: AsyncCalls, state: State) -> Callable[..., Any]:
    """FastAPI reads the parameters of a path from the signature of its handler, which is made here."""

    async def handle(body: BaseModel | None = None, **query: Any) -> Response:
        asked = query if body is None else dict(body)
        counted = None if each.operation is None else state.http_counts.operation(SLEEP_MODE, each.operation)
        with counted or nullcontext():
            result = await getattr(engine, each.call.__name__)(**asked)
        return Response() if each.model is None else JSON(each.respond(result, asked))

    handle.__name__ = each.endpoint.name.lower()
    vars(handle)["__signature__"] = inspect.Signature(_body(each) if each.has_body else _query(each.call))
    return handle


def _query(call: Callable[..., Any]) -> list[Parameter]:
    return [
        own.replace(kind=Parameter.KEYWORD_ONLY, annotation=Annotated[own.annotation, _QUERY.get(own.name, Query())])
        for own in _parameters(call)
    ]


def _body(each: _Call) -> list[Parameter]:
    fields: dict[str, Any] = {own.name: (own.annotation, own.default) for own in _parameters(each.call)}
    name = each.endpoint.name.title().replace("_", "") + "Request"
    model = create_model(name, __config__=ConfigDict(strict=True), **fields)
    return [Parameter("body", Parameter.KEYWORD_ONLY, default=None, annotation=model | None)]


def _parameters(call: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a method of `EngineCalls`, with their types."""
    _, *own = inspect.signature(call, eval_str=True).parameters.values()
    return own


def add_fleet_endpoints(app: FastAPI, engine: ServingEngine) -> None:
    """Add the paths that show the engine, abort requests, call workers, and change the number of ranks."""
    num_scalings = 0

    @Endpoint.SERVER_INFO.route(app, responses=responses(ServerInfo, *_ERRORS))
    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        """The engine's configuration, raycore's environment variables without keys, and versions."""
        config = msgspec.to_builtins(engine.config, enc_hook=str, str_keys=True)
        env = {name: value for name, value in os.environ.items() if name.startswith("RAYCORE_") and "KEY" not in name}
        system = {"versions": versions(), "hardware": hardware()}
        return JSON(
            {
                "vllm_config": config if config_format == "json" else str(config),
                "vllm_env": env,
                "system_env": system,
            }
        )

    @Endpoint.ABORT_REQUESTS.route(app, responses=responses(Aborted, *_BODY_ERRORS))
    async def abort_requests(body: AbortRequest) -> Response:
        """End requests with their output so far. Without `request_ids`, all requests."""
        return JSON({"status": "aborted", "aborted": await engine.abort_requests(body.request_ids or None)})

    @Endpoint.COLLECTIVE_RPC.route(app, responses=responses(RpcResults, *_BODY_ERRORS))
    async def collective_rpc(body: CollectiveRpcRequest) -> Response:
        """Call a method of each worker."""
        results = await engine.collective_rpc(body.method, body.timeout, tuple(body.args), body.kwargs)
        # a worker may return anything; what isn't an object or a list is sent as text
        return JSON({"results": [each if isinstance(each, (dict, list, NoneType)) else str(each) for each in results]})

    @Endpoint.SCALE_ELASTIC_EP.route(app, responses=responses(Told, *_BODY_ERRORS))
    async def scale_elastic_ep(body: ScaleRequest) -> Response:
        """Change the number of data-parallel ranks while requests run."""
        nonlocal num_scalings
        num_scalings += 1
        try:
            await engine.scale(body.new_data_parallel_size, body.drain_timeout)
        except TimeoutError as error:
            raise APIError(408, str(error), code="request_timeout") from error
        except PlacementShortage as error:
            name = "new_data_parallel_size"
            raise APIError(400, f"{name}={body.new_data_parallel_size}: {error}", param=name) from error
        finally:
            num_scalings -= 1
        return JSON({"message": f"Scaled to {body.new_data_parallel_size} data parallel engines"})

    @Endpoint.IS_SCALING_ELASTIC_EP.route(app, responses=responses(Scaling, *_ERRORS))
    async def is_scaling_elastic_ep() -> Response:
        """Whether the server that answers is changing the number of ranks."""
        return JSON({"is_scaling_elastic_ep": num_scalings > 0})


def add_adapter_endpoints(app: FastAPI, adapters: LoadsAdapters) -> None:
    """Add the paths that load and unload LoRA adapters."""

    @Endpoint.LOAD_LORA_ADAPTER.route(app, responses=responses(Status, 403, *_BODY_ERRORS))
    async def load_lora_adapter(body: LoadLoraAdapterRequest) -> Response:
        """Load a LoRA adapter from the server's disk. Requests may then give its name as `model`."""
        await adapters.load_lora_adapter(body.lora_name, body.lora_path, body.load_inplace)
        return JSON({"status": "loaded"})

    @Endpoint.UNLOAD_LORA_ADAPTER.route(app, responses=responses(Status, 404, *_BODY_ERRORS))
    async def unload_lora_adapter(body: UnloadLoraAdapterRequest) -> Response:
        """Refuse new requests for a LoRA adapter. Requests in progress finish."""
        await adapters.unload_lora_adapter(body.lora_name, body.lora_int_id)
        return JSON({"status": "unloaded"})
