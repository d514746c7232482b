"""Turns `sampling_params` of the token endpoints into sampling parameters, and back. Pure."""

from __future__ import annotations

from typing import Any, cast

import msgspec
from pydantic import ValidationError

from raycore.errors import InvalidRequest
from raycore.json_fields import shortened
from raycore.parts.transfers.server import with_params
from raycore.reasoning_tags import ReasoningTags
from raycore.sampling_params import SamplingParams
from raycore.server.dialects.tokens.protocol import GenerateRequest
from raycore.server.generation.sampling import completion_params
from raycore.server.http.errors import APIError, as_api_error, invalid_body, unsupported
from raycore.server.options import ServerOptions
from raycore.server.protocol import CompletionRequest, SamplingRequest
from raycore.structured_outputs import StructuredOutputsParams

_RENDERED = ("stop_after", "stop_or_from", "extra_args", "trace_decode_token_ids")
"""What `SamplingParams` has and requests with texts don't: rendering sets them, or only callers with tokens."""

_CHOSEN = frozenset({*_RENDERED, "structured_outputs", "reasoning_tags", "detokenize"})
"""What is set apart from the others."""

_IGNORED = frozenset({"output_kind", "skip_clone", "output_text_buffer_length"})
"""Parameters of vLLM that say how its engine hands over outputs."""

_KNOWN = (SamplingRequest.model_fields.keys() | {"logprobs"}) - GenerateRequest.model_fields.keys()
"""The parameters that are checked as those of a completion."""

_NEUTRAL: tuple[Any, ...] = (None, False, 0, [], {})
"""Values that change nothing, of parameters that this server doesn't have."""


def sampling_params(request: GenerateRequest, options: ServerOptions) -> SamplingParams:
    """The sampling parameters of a request. `max_tokens` is None if the request doesn't say it.

    Raises:
        APIError: a parameter is invalid or unknown.
    """
    given = request.sampling_params
    fields: dict[str, Any] = {"prompt": request.token_ids, "max_tokens": None}
    for name, value in given.items():
        if name in _CHOSEN or name in _IGNORED or name.startswith("_"):
            continue
        if name in _KNOWN:
            fields[name] = value
        elif value not in _NEUTRAL:
            raise unsupported("sampling_params", f"{name}={value!r} isn't supported")
    if fields.get("logprob_token_ids"):
        fields.setdefault("logprobs", 0)  # only requests need it
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = {str(key): bias for key, bias in cast("dict[Any, Any]", fields["logit_bias"]).items()}
    try:
        body = CompletionRequest.model_validate(fields)
        params = completion_params(body, {}, options)
    except ValidationError as error:
        told = invalid_body(error.errors())
        raise APIError(400, f"sampling_params.{told.message}", param="sampling_params") from error
    chosen = {name: given[name] for name in _RENDERED if given.get(name) is not None}
    chosen |= {"max_tokens": given.get("max_tokens"), "detokenize": _detokenizes(request, params)}
    chosen |= {"structured_outputs": _constraint(given.get("structured_outputs"))}
    if given.get("reasoning_tags") is not None:
        chosen["reasoning_tags"] = _reasoning_tags(given["reasoning_tags"])
    try:
        chosen["extra_args"] = with_params(chosen.get("extra_args"), request.kv_transfer_params)
        return msgspec.structs.replace(params, **chosen)
    except InvalidRequest as error:
        raise as_api_error(error) from error


def as_json(params: SamplingParams) -> dict[str, Any]:
    """All of the parameters by name, for JSON. `sampling_params` makes the same parameters of them."""
    fields: dict[str, Any] = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    for name in ("return_hidden_states", "return_prompt_hidden_states", *_IGNORED):
        fields.pop(name, None)
    return msgspec.to_builtins(fields, str_keys=True)


def _reasoning_tags(given: Any) -> ReasoningTags:
    try:
        return msgspec.convert(given, ReasoningTags)
    except msgspec.ValidationError as error:
        raise APIError(400, f"reasoning_tags={shortened(given)}: {error}", param="sampling_params") from error


def _constraint(given: Any) -> StructuredOutputsParams | None:
    """The constraint on the output, without what vLLM adds for its own engine."""
    if not given:
        return None
    if not isinstance(given, dict):
        raise APIError(400, f"structured_outputs={shortened(given)} isn't an object", param="sampling_params")
    fields = cast("dict[str, Any]", given)
    kept = {name: each for name, each in fields.items() if not name.startswith("_") and each not in (None, False)}
    for name in kept.keys() - StructuredOutputsParams.__struct_fields__:
        raise unsupported("sampling_params", f"structured_outputs.{name} isn't supported")
    return StructuredOutputsParams(**kept)


def _detokenizes(request: GenerateRequest, params: SamplingParams) -> bool:
    """Whether the engine makes text of the tokens: only if something needs the text."""
    asked = request.sampling_params.get("detokenize")
    if asked is False and request.output_mode == "text":
        raise APIError(400, "output_mode='text' needs sampling_params.detokenize=true", param="output_mode")
    return request.output_mode == "text" or (asked is not False and bool(params.stop))
