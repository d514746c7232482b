"""The OpenAPI document: what each path may answer."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from raycore.server.generation import ServingEngine
from raycore.server.openapi.response_models import ErrorAnswer
from raycore.server.openapi.value_ranges import add_ranges
from raycore.server.options import ServerOptions

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "The request can't be run; the error names the parameter",
    401: "The API key is missing or wrong",
    404: "There is no such model",
    408: "The body didn't come in time",
    413: "The body is too large",
    429: "Too many requests are under way",
    500: "The request failed",
    503: "The engine is gone, or draining",
}
_EVENT = {
    "type": "object",
    "description": "With stream=true: an event for each part, or for the error that ended it, then [DONE]",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")


def responses(answer: type[BaseModel] | None, *errors: int, streams: bool = False) -> Responses:
    """What a path answers: `answer` (None: nothing) when it succeeds, or one of `errors`."""
    success: dict[str, Any] = {"description": "It worked"}
    if answer is not None:
        success["model"] = answer
    if streams:
        success["content"] = {"text/event-stream": {"schema": _EVENT}}
    told: Responses = {status: {"description": _ERRORS[status], "model": ErrorAnswer} for status in errors}
    return {200: success, **told}


def describe(app: FastAPI, options: ServerOptions, engine: ServingEngine) -> dict[str, Any]:
    """The document: FastAPI's own, with this server's ranges and key, and without the 422 that any body might get."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    schemas = document["components"]["schemas"]
    for name in _UNUSED_SCHEMAS:
        schemas.pop(name, None)
    add_ranges(schemas, options, engine)
    if options.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
