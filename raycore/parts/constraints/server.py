"""Converts the fields by which a request constrains its output to `StructuredOutputsParams`. Pure functions."""

from __future__ import annotations

from typing import Any

from raycore.errors import InvalidRequest, RequestFailed
from raycore.server.http.errors import APIError
from raycore.server.protocol import SamplingRequest
from raycore.structured_outputs import StructuredOutputsParams

_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
"""The names that earlier versions of vLLM have for fields of `structured_outputs`."""


def structured_outputs(request: SamplingRequest) -> StructuredOutputsParams | None:
    """The constraint that a request sets on its output, or None.

    Raises:
        APIError: the constraint is invalid, or two fields set one. The error names the field.
    """
    param, values = constraint_param(request), _response_format(request) or _guided(request)
    if request.structured_outputs is not None:
        if values is not None:
            raise APIError(400, f"{param} and structured_outputs: give only one of them", param=param)
        values = request.structured_outputs.model_dump(exclude_none=True, by_alias=True)
    if values is None:
        return None
    try:
        return StructuredOutputsParams(**values)
    except InvalidRequest as error:
        raise named(error, param) from error


def constraint_param(request: SamplingRequest) -> str:
    """The name of the field that sets the request's constraint."""
    if _response_format(request) is not None:
        return "response_format"
    return next((name for name in _GUIDED if getattr(request, name) is not None), "structured_outputs")


def named(error: InvalidRequest | RequestFailed, param: str) -> APIError:
    """The error response for a constraint that is invalid or can't be followed. The request's field `param` sets it."""
    said = str(error)
    return APIError(400, said if said.startswith(param) else f"{param}: {said}", param=param)


def close_reasoning(prompt: str) -> str:
    """If the prompt ends with an open `<think>`, append `</think>`, so that the output is content and not reasoning."""
    return f"{prompt}\n</think>\n\n" if prompt.rstrip().endswith("<think>") else prompt


def _guided(request: SamplingRequest) -> dict[str, Any] | None:
    given = {own: value for name, own in _GUIDED.items() if (value := getattr(request, name)) is not None}
    return given or None


def _response_format(request: SamplingRequest) -> dict[str, Any] | None:
    asked = request.response_format
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"json_object": True}
    if asked.type == "structural_tag":
        fields = {name: getattr(asked, name) for name in ("structures", "triggers", "format")}
        return {"structural_tag": {name: value for name, value in fields.items() if value is not None}}
    if asked.json_schema is None or asked.json_schema.json_schema is None:
        raise APIError(400, "response_format.json_schema.schema is missing", param="response_format")
    return {"json": asked.json_schema.json_schema}
