"""Describes the responses of a path, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from raycore.server.openapi.response_models import ErrorAnswer

Responses = dict[int | str, dict[str, Any]]

_ERRORS = {
    400: "Invalid request; the error names the parameter",
    401: "The API key is missing or invalid",
    403: "The server's options don't allow it",
    404: "The model doesn't exist",
    408: "The request body didn't arrive in time",
    409: "The engine's weights changed, and the request has on_version_change=fail",
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


def responses(
    answer: type[BaseModel] | None, *errors: int, streams: bool = False, error: type[BaseModel] = ErrorAnswer
) -> Responses:
    """A path's responses, in FastAPI's format: `answer` on success (None: an empty body), and `error` with the statuses
    `errors`."""
    success: dict[str, Any] = {"description": "Successful response"}
    if answer is not None:
        success["model"] = answer
    if streams:
        success["content"] = {"text/event-stream": {"schema": _EVENT}}
    told: Responses = {status: {"description": _ERRORS[status], "model": error} for status in errors}
    return {200: success, **told}
