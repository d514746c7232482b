"""Errors in the format of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException

from raycore.errors import (
    EngineDeadError,
    InvalidInput,
    RaycoreError,
    RequestFailed,
    RequestTooLarge,
    WeightVersionChanged,
)
from raycore.json_fields import shortened
from raycore.pooling_params import PoolingParams
from raycore.server.protocol import ChatCompletionRequest, CompletionRequest

_PARAMETERS = frozenset(CompletionRequest.model_fields | ChatCompletionRequest.model_fields).union(
    PoolingParams.__struct_fields__, ["response_id", "lora_name", "lora_path", "lora_int_id", "load_inplace"]
)
_SUBJECT = re.compile(r"(?:the )?(\w+)")


class NotAllowed(InvalidInput):
    """A request asks for something that this server's options don't allow."""


class NotFound(InvalidInput):
    """A request names something that doesn't exist."""


class APIError(HTTPException):
    """An error response. `kind` is the value of the field `type` in its body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        # messages quote what clients sent, which may contain halves of surrogate pairs
        self.message = message.encode(errors="replace").decode()
        super().__init__(status, self.message)
        self.status = status
        self.param = param if param is None else param.encode(errors="replace").decode()
        self.code = code
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """The body of the response: an error object in OpenAI's format."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def with_names(error: APIError, names: Mapping[str, str]) -> APIError:
    """The error for a request that was turned into another one, whose fields it names.

    `names`: the name of a field in the client's request, by its name in the other.
    """
    if error.param is None or error.param not in names:
        return error
    name = names[error.param]
    message = re.sub(rf"\b{re.escape(error.param)}\b", lambda _: name, error.message)
    return APIError(error.status, message, param=name, code=error.code, kind=error.kind)


def unsupported(param: str, why: str) -> APIError:
    """The error for a parameter that OpenAI or vLLM document, if this server doesn't support it or its value."""
    return APIError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def invalid_body(errors: Sequence[Any]) -> APIError:
    """The error response for a body in which pydantic has found `errors`. Only the first one is reported."""
    first = errors[0]
    loc = [str(part) for part in first["loc"]]
    if loc[:1] == ["query"]:
        del loc[0]
    where = [part for part in loc if part not in ("body", "header") and not part.startswith("literal[")]
    if first["type"] == "json_invalid":
        return APIError(400, f"the request body isn't valid JSON: {first.get('ctx', {}).get('error', first['msg'])}")
    if first["type"] == "extra_forbidden":
        where.append(first["ctx"]["name"])
        return APIError(400, f"unrecognized request argument: {'.'.join(where)}", param=where[0])
    what = f": {first['msg']}"
    if first["type"] == "literal_error":
        what = f"={shortened(first['input'])} is not supported: use {first['ctx']['expected']}"
    return APIError(400, (".".join(where) or "body") + what, param=where[0] if where else None)


def unreadable_body(error: HTTPException) -> APIError:
    """The error response for a body that FastAPI can't read as JSON for another reason than its syntax."""
    cause = error.__cause__
    if isinstance(cause, UnicodeDecodeError):
        return APIError(400, f"the request body isn't UTF-8: {cause.reason} at byte {cause.start}")
    return APIError(error.status_code, f"the request can't be read: {error.detail}")


def as_api_error(error: BaseException) -> APIError:
    """The error response for an exception."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, NotAllowed):
        return APIError(403, str(error), param=_subject(str(error)), code="not_allowed", kind="permission_error")
    if isinstance(error, NotFound):
        return APIError(404, str(error), param=_subject(str(error)), code="not_found")
    if isinstance(error, InvalidInput):
        code = "context_length_exceeded" if isinstance(error, RequestTooLarge) else None
        return APIError(400, str(error), param=_subject(str(error)), code=code)
    if isinstance(error, EngineDeadError):
        # the rest of the message is a traceback, which clients must not see
        return APIError(503, str(error).partition("\n")[0], code="engine_dead", kind="service_unavailable_error")
    if isinstance(error, WeightVersionChanged):
        return APIError(409, str(error), code="weight_version_changed")
    if isinstance(error, RequestFailed):
        if (param := _subject(str(error))) is not None:
            return APIError(400, str(error), param=param, code="request_failed")
        return APIError(500, str(error).partition("\n")[0], code="request_failed", kind="server_error")
    if isinstance(error, RaycoreError):
        return APIError(500, str(error).partition("\n")[0], kind="server_error")
    return APIError(500, "internal error; see the server's log", kind="server_error")


def _subject(message: str) -> str | None:
    """The request's parameter with which an error message begins; None if it begins otherwise.

    The messages of the engine's checks begin with the parameter's name.
    """
    found = _SUBJECT.match(message)
    return found[1] if found and found[1] in _PARAMETERS else None
