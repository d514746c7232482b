"""Converts a request's fields to sampling parameters, and checks the server's limits. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from raycore.errors import InvalidRequest
from raycore.parts.constraints.server import structured_outputs
from raycore.parts.images.server import has_images
from raycore.parts.transfers.server import with_params
from raycore.sampling_params import MAX_SEED, RepetitionDetectionParams, SamplingParams, json_like
from raycore.server.copied_parameters import COPIED
from raycore.server.generation.beams import shell_params
from raycore.server.http.errors import APIError, as_api_error, unsupported
from raycore.server.http.ignored_fields import ignore
from raycore.server.options import ServerOptions
from raycore.server.parsers.reasoning import parser_named, tags_of
from raycore.server.protocol import (
    INT64_MAX,
    ChatCompletionRequest,
    CompletionRequest,
    ResponseStreamOptions,
    Routed,
    SamplingRequest,
)

DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion. A chat completion is limited only by `max_model_len` by default."""

TOKEN_ID_PATTERN = "[0-9]{1,18}"
"""Matches the keys of `logit_bias`."""


def _seed(seed: int) -> int | None:
    return None if seed == -1 else seed & MAX_SEED  # OpenAI allows negative seeds


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not re.fullmatch(TOKEN_ID_PATTERN, key):
            raise APIError(400, f"logit_bias has the key {key!r}, which isn't a token id", param="logit_bias")
    return {int(token_id): max(-100.0, min(100.0, bias)) for token_id, bias in given.items()}


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "seed": _seed,
    "logit_bias": _logit_bias,
    "repetition_detection": lambda given: RepetitionDetectionParams(**given.model_dump(exclude_none=True)),
}
"""By name: what turns the value of a request's field into the parameter's. The others are the same."""

ABSENT = {
    "audio": "this model generates text only",
    "function_call": "deprecated by OpenAI: use tool_choice",
    "functions": "deprecated by OpenAI: use tools",
    "moderation": "moderation isn't supported",
    "prompt_cache_options": "requests can't configure the prefix cache",
    "prediction": "predicted outputs aren't supported",
    "web_search_options": "web search isn't supported",
    "suffix": "inserting text before a suffix isn't supported",
    "guided_decoding_backend": "removed by vLLM: use structured_outputs",
    "guided_whitespace_pattern": "removed by vLLM: use structured_outputs",
}
"""Fields that OpenAI or vLLM document but this server doesn't support, each with the reason for its refusal."""

ONLY: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "verbosity": ("medium",),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "ec_transfer_params": ({},),
    "watermarking": (False,),
    "stream_interval": (1,),
}
"""Fields that are accepted only with these values, which have no effect."""

HINTS = frozenset(
    {
        *("audio", "function_call", "functions", "modalities", "moderation", "prediction", "web_search_options"),
        *("prompt_cache_options", "service_tier", "store", "verbosity"),
        *("early_stopping", "guided_decoding_backend", "guided_whitespace_pattern", "length_penalty"),
        "stream_interval",
    }
)
"""Those of the fields above whose other values are ignored rather than refused: a client can use the answer anyway."""
WITHOUT_IMAGES: dict[str, tuple[Any, ...]] = {"mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}
"""The same for requests without images."""
WITHOUT_BEAMS: dict[str, tuple[Any, ...]] = {"length_penalty": (1.0,)}
"""The same for requests without beam search."""


def completion_params(request: CompletionRequest, defaults: dict[str, Any], options: ServerOptions) -> SamplingParams:
    """The sampling parameters of a completion request. Raises APIError if one is invalid; the error names its field."""
    _check_logprobs("logprobs", request.logprobs, options)
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    chosen: dict[str, Any] = {"logprobs": request.logprobs, "max_tokens": max_tokens}
    _check_logprob_token_ids(request, chosen, "logprobs")
    if request.thinking_token_budget is not None and options.reasoning_parser is not None:
        chosen["reasoning_tags"] = tags_of(parser_named(options.reasoning_parser))
    if request.echo:
        chosen["prompt_logprobs"] = request.logprobs if request.prompt_logprobs is None else request.prompt_logprobs
        if request.max_tokens == 0:
            chosen["max_tokens"] = 1  # the engine generates at least one token, which the response leaves out
    return _params(request, defaults, options, chosen)


def chat_params(request: ChatCompletionRequest, defaults: dict[str, Any], options: ServerOptions) -> SamplingParams:
    """The sampling parameters of a chat request. Raises APIError if one is invalid; the error names its field."""
    if request.top_logprobs and not request.logprobs:
        raise APIError(400, "top_logprobs needs logprobs=true", param="top_logprobs")
    _check_logprobs("top_logprobs", request.top_logprobs, options)
    name, max_tokens = asked_length(request)
    if max_tokens is not None and max_tokens < 1:
        raise APIError(400, f"{name}={max_tokens} isn't at least 1", param=name)
    chosen: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    if request.logprobs:
        chosen["logprobs"] = request.top_logprobs or 0
    _check_logprob_token_ids(request, chosen, "logprobs=true")
    return _params(request, defaults, options, chosen)


def _check_logprob_token_ids(request: SamplingRequest, chosen: dict[str, Any], needed: str) -> None:
    """Let `logprob_token_ids`, which need the field `logprobs`, take the place of the most likely tokens."""
    if request.logprob_token_ids:
        if chosen.get("logprobs") is None:
            raise APIError(400, f"logprob_token_ids needs {needed}", param="logprob_token_ids")
        chosen |= {"logprobs": None, "logprob_token_ids": request.logprob_token_ids}


def asked_length(request: ChatCompletionRequest) -> tuple[str, int | None]:
    """The name of the field that limits the output's length, and the field's value."""
    if request.max_completion_tokens is not None or request.max_tokens is None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _params(
    request: SamplingRequest, defaults: dict[str, Any], options: ServerOptions, chosen: dict[str, Any]
) -> SamplingParams:
    only = ONLY | ({} if _has_images(request) else WITHOUT_IMAGES)
    check_documented(request, ABSENT, only if request.use_beam_search else only | WITHOUT_BEAMS)
    if request.best_of not in (None, request.n or 1) and not ignore("best_of"):
        raise unsupported("best_of", f"{request.best_of} isn't supported; it must equal n={request.n or 1}")
    _check_stream(request)
    if request.use_beam_search:
        return shell_params(request, chosen, options.max_n)
    _check_limit("n", request.n, options.max_n)
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _check_words("stop", stops, options.max_stop_strings, options)
    _check_words("bad_words", request.bad_words or [], options.max_bad_words, options)
    _check_logprobs("prompt_logprobs", request.prompt_logprobs, options)
    chosen["structured_outputs"] = structured_outputs(request)
    given = {name: value for name in COPIED if (value := getattr(request, name)) is not None}
    values: dict[str, Any] = {"max_tokens": None} | defaults | given | chosen
    try:
        values |= {name: convert(given[name]) for name, convert in _CONVERSIONS.items() if name in given}
        extra_args = json_like("vllm_xargs", request.vllm_xargs) if request.vllm_xargs else None
        values["extra_args"] = with_params(extra_args, request.kv_transfer_params)
        return SamplingParams(**values)
    except InvalidRequest as error:
        raise as_api_error(error) from error


def _has_images(request: SamplingRequest) -> bool:
    return isinstance(request, ChatCompletionRequest) and has_images(request.messages)


def check_documented(request: Routed, absent: Mapping[str, str], only: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise APIError if a field that isn't supported has a value.

    Args:
        absent: such fields, each with the reason for its refusal.
        only: fields that are accepted only with these values, which have no effect.
    """
    for name, why in absent.items():
        if getattr(request, name, None) is not None and not _is_ignored(name):
            raise unsupported(name, why)
    for name, values in only.items():
        value = getattr(request, name, None)
        if value is not None and value not in values and not _is_ignored(name):
            raise unsupported(name, f"{value!r} isn't supported; use {' or '.join(map(repr, values))}")


def _is_ignored(name: str) -> bool:
    return name in HINTS and ignore(name)


def check_stream_options(is_streamed: bool | None, options: ResponseStreamOptions | None) -> None:
    """Raise APIError if a request's `stream_options` are for nothing, or can't be followed."""
    if options is None:
        return
    if not is_streamed and options.model_fields_set:
        raise APIError(400, "stream_options needs stream=true", param="stream_options")
    name = "stream_options.include_obfuscation"
    if options.include_obfuscation and not ignore(name):
        raise unsupported(name, "true isn't supported; omit it")


def _check_stream(request: SamplingRequest) -> None:
    check_stream_options(request.stream, request.stream_options)
    if request.stream and request.prompt_logprobs:
        raise APIError(400, "prompt_logprobs isn't supported with stream=true", param="prompt_logprobs")


def _check_logprobs(name: str, value: int | None, options: ServerOptions) -> None:
    most = options.max_logprobs
    if value == most == -1:
        return
    if most == -1 or value is None:
        _check_limit(name, value, INT64_MAX)
    elif not 0 <= value <= most:
        advice = "--max-logprobs allows others, and -1 there all of the vocabulary"
        raise APIError(400, f"{name}={value} isn't in [0, {most}]: {advice}", param=name)


def _check_limit(name: str, value: int | None, most: int) -> None:
    if value is not None and not 0 <= value <= most:
        raise APIError(400, f"{name}={value} isn't in [0, {most}]", param=name)


def _check_words(name: str, words: list[str], most: int, options: ServerOptions) -> None:
    if len(words) > most:
        raise APIError(400, f"{name} has {len(words)} strings; at most {most} are allowed", param=name)
    longest = max(map(len, words), default=0)
    if longest > options.max_word_characters:
        raise APIError(
            400,
            f"{name} has a string of {longest} characters; at most {options.max_word_characters} are allowed",
            param=name,
        )
