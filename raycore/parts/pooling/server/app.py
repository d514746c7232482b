"""The endpoints of models that pool."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from raycore.parts.pooling.server.families import FAMILIES, PoolingFamily
from raycore.parts.pooling.server.pooled import BytesAnswer
from raycore.parts.pooling.server.protocol import Encoded
from raycore.server.endpoints import Endpoint
from raycore.server.generation import ServingEngine
from raycore.server.headers import DataParallelRank
from raycore.server.models import Models
from raycore.server.openapi.document import responses
from raycore.server.options import ServerOptions
from raycore.server.preparation import handle_body
from raycore.server.refusals import is_served
from raycore.server.request_ids import request_id_of
from raycore.server.streaming import JSON, unless_client_leaves

_ERRORS = (400, 401, 404, 408, 413, 429, 500, 503)


def add_pooling(app: FastAPI, engine: ServingEngine, options: ServerOptions, models: Models) -> None:
    """Add the endpoints that the engine's model has."""
    for endpoint, family in FAMILIES.items():
        if is_served(endpoint, engine.pooling_spec):
            _add(app, endpoint, family, engine, options, models)


def _add(
    app: FastAPI,
    endpoint: Endpoint,
    family: PoolingFamily,
    engine: ServingEngine,
    options: ServerOptions,
    models: Models,
) -> None:
    async def pool(
        body: Any,
        request: Request,
        data_parallel_rank: DataParallelRank = None,
    ) -> Response:
        body.send_to(data_parallel_rank)
        body.request_id = body.request_id or request_id_of(request.scope)
        prepared = await handle_body(request, family.prepare, engine, body, options, models)
        answer = await unless_client_leaves(request, prepared.answer())
        return answer if isinstance(answer, BytesAnswer) else JSON(answer)

    pool.__annotations__["body"] = family.body
    pool.__doc__ = family.what
    described = responses(family.answer, *_ERRORS)
    if issubclass(family.body, Encoded):
        schema = {"type": "string", "format": "binary"}
        described[200]["content"] = {BytesAnswer.media_type: {"schema": schema}}
    endpoint.route(app, responses=described)(pool)
