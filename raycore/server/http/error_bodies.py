"""The bodies of error responses: of the form that the clients of a path expect."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from raycore.server.endpoints import is_anthropic, path_of
from raycore.server.http.errors import APIError
from raycore.server.http.request_ids import request_id_of

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""By status: the type of an error of Anthropic's API."""


def error_body(error: APIError, scope: Scope) -> dict[str, Any]:
    """The body of an error response to a request: OpenAI's error object, or Anthropic's on the paths of its API."""
    if not is_anthropic(path_of(scope)):
        return error.body()
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {
        "type": "error",
        "error": {"type": kind, "message": error.message},
        "request_id": request_id_of(scope),
    }
