"""Endpoints that tell of the server: its models, whether it is well, its version, its load."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from starlette.exceptions import HTTPException

from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.handlers import answers
from raycore.server.contract.models import ListedModel
from raycore.server.contract.service import Context
from raycore.server.http.errors import APIError
from raycore.server.operations.response_models import Load, Model, ModelList, Version


@answers(ModelList)
async def list_models(context: Context) -> dict[str, Any]:
    """List the names under which the model is served, and the adapters."""
    return {"object": "list", "data": [_described(each, context.engine) for each in context.models.listed()]}


@answers(Model, errors=(404,))
async def model(context: Context, model: str) -> dict[str, Any]:
    """Look up one of the names under which the model is served, or an adapter."""
    if not model:  # the path ends with a slash
        raise HTTPException(404)
    return _described(context.models.look_up(model), context.engine)


def _described(model: ListedModel, engine: ServingEngine) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "raycore",
        "root": model.root or engine.config.model.model,
        "parent": model.parent,
        "max_model_len": engine.max_model_len,
    }


@answers(None, errors=(503,), name="health")
async def health(context: Context) -> None:
    """200 while the engine accepts requests; 503 when it has failed or is draining."""
    reason = context.engine.unavailable_reason
    if reason is not None:
        raise APIError(503, reason, code="engine_unavailable", kind="service_unavailable_error")


ping = posted_ping = health


@answers(Version)
async def show_version(context: Context) -> dict[str, Any]:
    """The version of raycore."""
    return {"version": version("raycore")}


@answers(Load)
async def load(context: Context) -> dict[str, Any]:
    """The number of requests to the model or its tokenizer in progress in the process that answers."""
    return {"server_load": context.service.in_progress.count}
