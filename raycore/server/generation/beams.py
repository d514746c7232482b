"""The fields of requests that ask for a beam search."""

from __future__ import annotations

from typing import Any

from raycore.beam_search import BeamSearchParams
from raycore.errors import InvalidRequest
from raycore.sampling_params import SamplingParams
from raycore.server.http.errors import APIError, as_api_error
from raycore.server.protocol import SamplingRequest

_UNUSABLE = (
    *("stop", "stop_token_ids", "min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "prompt_logprobs"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "structured_outputs", "response_format"),
    "kv_transfer_params",
)
"""Fields that would change which sequences are the best, and what a KV connector is told of single ones. Those of
sampling alone have no effect."""
_NEUTRAL: dict[str, Any] = {"repetition_penalty": 1.0}


def shell_params(request: SamplingRequest, chosen: dict[str, Any], most: int) -> SamplingParams:
    """Return what a request for a beam search has of sampling parameters: how many sequences, and what is shown.

    Args:
        chosen: the parameters that the endpoint sets.
        most: the largest number of beams.

    Raises:
        APIError: a field can't be used with beam search, or is invalid.
    """
    for name in _UNUSABLE:
        value = getattr(request, name, None)
        is_text = name == "response_format" and getattr(value, "type", None) == "text"
        if value and value != _NEUTRAL.get(name) and not is_text:
            raise APIError(400, f"{name} can't be used with use_beam_search", param=name)
    if request.stream:
        raise APIError(
            400, "stream=true can't be used with use_beam_search: its sequences change until the end", param="stream"
        )
    width = 1 if request.n is None else request.n
    if not 1 <= width <= most:
        raise APIError(400, f"n={width} isn't in [1, {most}]", param="n")
    values: dict[str, Any] = {"max_tokens": None, "n": width, "temperature": 1.0}
    values |= {name: chosen[name] for name in ("max_tokens", "logprobs") if name in chosen}
    for name in ("include_stop_str_in_output", "skip_special_tokens"):
        if getattr(request, name) is not None:
            values[name] = getattr(request, name)
    try:
        return SamplingParams(**values)
    except InvalidRequest as error:
        raise as_api_error(error) from error


def beam_params(
    request: SamplingRequest, params: SamplingParams, constraint_param: str, max_model_len: int
) -> BeamSearchParams | None:
    """Return what a request asks for if it asks for a beam search.

    Args:
        params: what `shell_params` has returned, maybe with a constraint.
        constraint_param: the field that has set the constraint.
        max_model_len: the largest `max_tokens`, and the default.
    """
    if not request.use_beam_search:
        return None
    if params.structured_outputs is not None:
        raise APIError(400, f"{constraint_param} can't be used with use_beam_search", param=constraint_param)
    penalty = 1.0 if request.length_penalty is None else request.length_penalty
    return BeamSearchParams(
        beam_width=params.n,
        max_tokens=max_model_len if params.max_tokens is None else min(params.max_tokens, max_model_len),
        ignore_eos=bool(request.ignore_eos),
        length_penalty=penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
    )
