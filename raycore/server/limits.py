"""Checks of a request's length. Errors state the numbers."""

from __future__ import annotations

from collections.abc import Sequence

from raycore.server.errors import APIError
from raycore.server.generation import ServingEngine


def check_text(engine: ServingEngine, text: str, param: str) -> None:
    """Raise APIError if a text has more characters than `max_model_len` tokens can have.

    Such a text need not be tokenized to know that it is too long.
    """
    most = engine.max_model_len
    if len(text) <= most:
        return
    longest = engine.get_tokenizer().longest_token
    if len(text) > most * longest:
        raise APIError(
            400,
            f"this model's maximum context length is {most} tokens, each of at most {longest} characters, but {param} "
            f"has {len(text)} characters. Shorten {param}.",
            param=param,
            code="context_length_exceeded",
        )


def check_length(
    engine: ServingEngine, prompt: Sequence[int], max_tokens: int | None, param: str, prompt_param: str
) -> None:
    """Raise APIError if prompt and output together exceed the model's maximum length.

    `param` and `prompt_param` are the names of the request's fields for the output's length and for the prompt.
    """
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
