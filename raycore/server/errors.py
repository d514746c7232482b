"""Errors as OpenAI's API words them."""

from __future__ import annotations

from typing import Any

from raycore.errors import EngineDeadError, InvalidInput, RaycoreError, RequestFailed


class APIError(Exception):
    """What a client is told instead of an answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """The error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def unsupported(param: str, why: str) -> APIError:
    """A documented parameter, or a value of it, that this server doesn't have."""
    return APIError(400, f"{param}: {why}", param=param, code="unsupported_parameter")


def as_api_error(error: BaseException) -> APIError:
    """What to tell a client of an error of the engine's."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, InvalidInput):
        return APIError(400, str(error))
    if isinstance(error, EngineDeadError):
        # the rest of the message is a traceback, which is the operator's
        return APIError(503, str(error).partition("\n")[0], code="engine_dead", kind="service_unavailable_error")
    if isinstance(error, RequestFailed):
        return APIError(500, str(error).partition("\n")[0], code="request_failed", kind="server_error")
    if isinstance(error, RaycoreError):
        return APIError(500, str(error).partition("\n")[0], kind="server_error")
    return APIError(500, "internal error; the server's log says more", kind="server_error")
