"""Checks of a request's length. Errors state the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from raycore.server.contract.engine import ServingEngine
from raycore.server.http.errors import APIError
from raycore.server.options import ServerOptions
from raycore.server.protocol import SamplingRequest


def encode_prompt(
    engine: ServingEngine, request: SamplingRequest, text: str, *, adds_special_tokens: bool
) -> list[int]:
    """The token ids of a prompt's text, cut if the request says so.

    The text is encoded whole: its number of characters doesn't tell its number of tokens, because normalizers drop
    characters and an unknown token may stand for many. `max_body_bytes` limits how long this takes.
    """
    tokenizer, most = engine.get_tokenizer(), _max_prompt(engine, request)
    if most is None:
        return tokenizer.encode(text, adds_special_tokens)
    return tokenizer.encode_within([text], most, adds_special_tokens, request.truncation_side or "left")[0]


def cut_prompt(engine: ServingEngine, request: SamplingRequest, token_ids: list[int]) -> list[int]:
    """The tokens of a prompt that is given as token ids, cut if the request says so."""
    most = _max_prompt(engine, request)
    if most is None or len(token_ids) <= most:
        return token_ids
    return token_ids[:most] if request.truncation_side == "right" else token_ids[-most:]


def _max_prompt(engine: ServingEngine, request: SamplingRequest) -> int | None:
    """How many tokens the request leaves of a prompt; None: all."""
    asked, most = request.truncate_prompt_tokens, engine.max_model_len
    if asked is None or asked == -1:
        return None if asked is None else most - 1
    if not 1 <= asked <= most:
        raise APIError(
            400, f"truncate_prompt_tokens={asked} isn't -1 or in [1, {most}]", param="truncate_prompt_tokens"
        )
    return asked


def check_length(
    engine: ServingEngine,
    prompt: Sequence[int],
    max_tokens: int | None,
    param: str,
    prompt_param: str,
    options: ServerOptions,
) -> None:
    """Raise APIError if a prompt leaves no room for output, or with `strict_max_tokens` for all of `max_tokens`.

    `param` and `prompt_param` are the names of the request's fields for the output's length and for the prompt.
    """
    if not options.strict_max_tokens:
        max_tokens = None  # the output ends at the model's length
    most, asked = engine.max_model_len, len(prompt) + (max_tokens if max_tokens is not None else 1)
    if asked > most:
        output = f" and {max_tokens} for the completion" if max_tokens is not None else ""
        prompt_fits = len(prompt) < most
        advice = f"Shorten the prompt or lower {param}." if prompt_fits else "Shorten the prompt."
        raise APIError(
            400,
            f"this model's maximum context length is {most} tokens, but {asked} were requested: "
            f"{len(prompt)} in the prompt{output}. {advice}",
            param=param if prompt_fits else prompt_param,
            code="context_length_exceeded",
        )
