"""Paths that are served only with the option `enable_admin_endpoints`, such as those that control the engine.

Paths, query parameters and responses are vLLM's. The parameters of a path that makes a call on the engine are those of
the call. Other paths have handlers of their own.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from inspect import Parameter
from types import NoneType
from typing import Annotated, Any, Literal

import msgspec
from fastapi import Query
from pydantic import BaseModel, ConfigDict, create_model

from raycore.control.calls import EngineCalls
from raycore.errors import PlacementShortage
from raycore.node.versions import hardware, versions
from raycore.parts.adapters.server.adapters import LoadsAdapters
from raycore.server.contract.handlers import Handler, answers, signature_of
from raycore.server.contract.service import Context, Service
from raycore.server.http.counts import SLEEP_MODE
from raycore.server.http.errors import APIError
from raycore.server.operations.protocol import (
    AbortRequest,
    CollectiveRpcRequest,
    LoadLoraAdapterRequest,
    ScaleRequest,
    UnloadLoraAdapterRequest,
)
from raycore.server.operations.response_models import (
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

Arguments = Mapping[str, object]

_QUERY = {"level": Query(ge=0, le=2), "reset_connector": Query(alias="reset_external")}
"""What the query has of parameters that is not in their types. The second name is vLLM's."""


def _call(
    call: Callable[..., Any],
    model: type[BaseModel] | None = None,
    respond: Callable[[Any, Arguments], dict[str, object]] = lambda result, asked: {},
    *,
    has_body: bool = False,
    operation: str | None = None,
) -> Handler:
    """The handler of a path that makes a call on the engine. The first paragraph of the call's docstring describes it.

    Args:
        call: a method of `EngineCalls`.
        model: of the response. None: it is empty.
        respond: makes the response from the call's result and arguments.
        has_body: whether the arguments are in an optional JSON object, not in the query.
        operation: its name in the metrics of the sleep mode. None: it isn't one of its operations.
    """

    async def work(context: Context, body: BaseModel | None = None, **query: Any) -> dict[str, object] | None:
        asked = query if body is None else dict(body)
        counts = context.service.http_counts
        with nullcontext() if operation is None else counts.operation(SLEEP_MODE, operation):
            result = await getattr(context.engine, call.__name__)(**asked)
        return None if model is None else respond(result, asked)

    description = inspect.cleandoc(call.__doc__ or "").split("\n\n")[0]
    return Handler(work, signature_of(_body(call) if has_body else _query(call)), description, model)


def _query(call: Callable[..., Any]) -> list[Parameter]:
    return [
        own.replace(kind=Parameter.KEYWORD_ONLY, annotation=Annotated[own.annotation, _QUERY.get(own.name, Query())])
        for own in _parameters(call)
    ]


def _body(call: Callable[..., Any]) -> list[Parameter]:
    fields: dict[str, Any] = {own.name: (own.annotation, own.default) for own in _parameters(call)}
    name = call.__name__.title().replace("_", "") + "Request"
    model = create_model(name, __config__=ConfigDict(strict=True), **fields)
    return [Parameter("body", Parameter.KEYWORD_ONLY, default=None, annotation=model | None)]


def _parameters(call: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a method of `EngineCalls`, with their types."""
    _, *own = inspect.signature(call, eval_str=True).parameters.values()
    return own


def _awake(is_awake: object, asked: Arguments) -> dict[str, object]:
    return {"status": "awake" if is_awake else "sleeping", "tags": asked["tags"]}


pause = _call(EngineCalls.pause_generation, Status, lambda result, asked: {"status": "paused"})
resume = _call(EngineCalls.resume_generation, Status, lambda result, asked: {"status": "resumed"})
is_paused = _call(EngineCalls.is_paused, Paused, lambda result, asked: {"is_paused": result})
sleep = _call(
    EngineCalls.sleep,
    SleepStatus,
    lambda _, asked: {"status": "sleeping", "level": asked["level"]},
    operation="sleep",
)
wake_up = _call(EngineCalls.wake_up, WakeStatus, _awake, operation="wake")
is_sleeping = _call(EngineCalls.is_sleeping, Sleeping, lambda result, asked: {"is_sleeping": result})
reset_prefix_cache = _call(EngineCalls.reset_prefix_cache, Success, lambda result, asked: {"success": result})
reset_mm_cache = _call(EngineCalls.reset_mm_cache)
reset_encoder_cache = _call(EngineCalls.reset_encoder_cache)
start_profile = _call(EngineCalls.start_profile, has_body=True)
stop_profile = _call(EngineCalls.stop_profile)


class _Scalings:
    """How many changes of the number of ranks are under way."""

    def __init__(self, service: Service) -> None:
        self.count = 0


@answers(ServerInfo)
async def server_info(context: Context, config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
    """The engine's configuration, raycore's environment variables without keys, and versions."""
    config = msgspec.to_builtins(context.engine.config, enc_hook=str, str_keys=True)
    env = {name: value for name, value in os.environ.items() if name.startswith("RAYCORE_") and "KEY" not in name}
    system = {"versions": versions(), "hardware": hardware()}
    return {
        "vllm_config": config if config_format == "json" else str(config),
        "vllm_env": env,
        "system_env": system,
    }


@answers(Aborted)
async def abort_requests(context: Context, body: AbortRequest) -> dict[str, Any]:
    """End requests with their output so far. Without `request_ids`, all requests."""
    return {"status": "aborted", "aborted": await context.engine.abort_requests(body.request_ids or None)}


@answers(RpcResults)
async def collective_rpc(context: Context, body: CollectiveRpcRequest) -> dict[str, Any]:
    """Call a method of each worker."""
    results = await context.engine.collective_rpc(body.method, body.timeout, tuple(body.args), body.kwargs)
    # a worker may return anything; what isn't an object or a list is sent as text
    return {"results": [each if isinstance(each, (dict, list, NoneType)) else str(each) for each in results]}


@answers(Told)
async def scale_elastic_ep(context: Context, body: ScaleRequest) -> dict[str, Any]:
    """Change the number of data-parallel ranks while requests run."""
    scalings = context.service.own(_Scalings)
    scalings.count += 1
    try:
        await context.engine.scale(body.new_data_parallel_size, body.drain_timeout)
    except TimeoutError as error:
        raise APIError(408, str(error), code="request_timeout") from error
    except PlacementShortage as error:
        name = "new_data_parallel_size"
        raise APIError(400, f"{name}={body.new_data_parallel_size}: {error}", param=name) from error
    finally:
        scalings.count -= 1
    return {"message": f"Scaled to {body.new_data_parallel_size} data parallel engines"}


@answers(Scaling)
async def is_scaling_elastic_ep(context: Context) -> dict[str, Any]:
    """Whether the server that answers is changing the number of ranks."""
    return {"is_scaling_elastic_ep": context.service.own(_Scalings).count > 0}


def _adapters(context: Context) -> LoadsAdapters:
    assert context.service.adapters is not None, "these paths are refused otherwise"
    return context.service.adapters


@answers(Status, errors=(403,))
async def load_lora_adapter(context: Context, body: LoadLoraAdapterRequest) -> dict[str, Any]:
    """Load a LoRA adapter from the server's disk. Requests may then give its name as `model`."""
    await _adapters(context).load_lora_adapter(body.lora_name, body.lora_path, body.load_inplace)
    return {"status": "loaded"}


@answers(Status, errors=(404,))
async def unload_lora_adapter(context: Context, body: UnloadLoraAdapterRequest) -> dict[str, Any]:
    """Refuse new requests for a LoRA adapter. Requests in progress finish."""
    await _adapters(context).unload_lora_adapter(body.lora_name, body.lora_int_id)
    return {"status": "unloaded"}
