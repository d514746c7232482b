"""Makes the OpenAPI document, and describes the responses of each path for it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from raycore.server.endpoints import Rule, endpoints_with
from raycore.server.generation import ServingEngine
from raycore.server.openapi.response_models import ErrorAnswer
from raycore.server.openapi.value_ranges import add_ranges
from raycore.server.options import ServerOptions

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "Invalid request; the error names the parameter",
    401: "The API key is missing or invalid",
    403: "The server's options don't allow it",
    404: "The model doesn't exist",
    408: "The request body didn't arrive in time",
    413: "The request body is too large",
    415: "The request body has a type, a compression or a charset that the server can't take",
    429: "Too many requests are in progress",
    500: "The request failed",
    503: "The engine has failed or is draining",
}
_EVENT = {
    "type": "object",
    "description": "With stream=true: an event for each part of the response or for an error",
    "properties": {"data": {"type": "string"}},
    "required": ["data"],
}
_UNUSED_SCHEMAS = ("HTTPValidationError", "ValidationError")


def responses(
    answer: type[BaseModel] | None, *errors: int, streams: bool = False, error: type[BaseModel] = ErrorAnswer
) -> Responses:
    """A path's responses, in FastAPI's format: `answer` on success (None: an empty body), and `error` with the statuses
    `errors`. What can be too large can be of a wrong type, too."""
    success: dict[str, Any] = {"description": "Successful response"}
    if answer is not None:
        success["model"] = answer
    if streams:
        success["content"] = {"text/event-stream": {"schema": _EVENT}}
    all_errors = sorted({*errors, 415}) if 413 in errors else errors
    told: Responses = {status: {"description": _ERRORS[status], "model": error} for status in all_errors}
    return {200: success, **told}


def describe(app: FastAPI, options: ServerOptions, engine: ServingEngine) -> dict[str, Any]:
    """The OpenAPI document: FastAPI's, with this server's value ranges and API key scheme.

    Status 422, which this server never sends, is removed.
    """
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            for parameter in operation.get("parameters", ()):
                _drop_null(parameter["schema"])
    schemas = document["components"]["schemas"]
    for name in _UNUSED_SCHEMAS:
        schemas.pop(name, None)
    add_ranges(schemas, options, engine)
    if options.api_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for endpoint in endpoints_with(Rule.NO_KEY):
            document["paths"][endpoint.path][endpoint.method.lower()]["security"] = []
    return document


def _drop_null(schema: dict[str, Any]) -> None:
    """Remove null from a parameter's values: text of a header, a path or a query can't be null, only be left out."""
    others = [each for each in schema.get("anyOf", ()) if each != {"type": "null"}]
    if len(others) == 1:
        del schema["anyOf"]
        schema |= others[0]
