"""From what a user passes as a prompt to checked token ids. Pure; says at once what could never run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from raycore.errors import InvalidRequest, RequestTooLarge
from raycore.messages import EngineInfo
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`."""


@dataclass(slots=True)
class ParsedPrompt:
    """A prompt as text, where it was given as such, and as token ids."""

    text: str | None
    token_ids: list[int]


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of integers is one prompt."""
    given: Any = prompts  # users may pass anything
    if isinstance(given, str | Mapping):
        return [cast(Prompt, given)]
    if not isinstance(given, Sequence):
        raise InvalidRequest(f"prompts={given!r} is neither a prompt nor a list of prompts")
    items = list(cast(Sequence[Any], given))
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items


def parse_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, add_special_tokens: bool = True
) -> list[ParsedPrompt]:
    """Tokenise those prompts that are text, all in one go."""
    parsed = [_split(index, prompt) for index, prompt in enumerate(prompts)]
    texts = [p.text for p in parsed if p.text is not None and not p.token_ids]
    encoded = iter(tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens) if texts else [])
    for p in parsed:
        if p.text is not None and not p.token_ids:
            p.token_ids = next(encoded)
    return parsed


def _split(index: int, prompt: Any) -> ParsedPrompt:
    if isinstance(prompt, Mapping):
        fields = cast(Mapping[str, Any], prompt)
        if "prompt_token_ids" in fields:
            return ParsedPrompt(fields.get("prompt"), _token_ids(index, fields["prompt_token_ids"]))
        if "prompt" not in fields:
            raise InvalidRequest(
                f"prompt {index} is a mapping without 'prompt' or 'prompt_token_ids': {sorted(fields)}"
            )
        prompt = fields["prompt"]
    if isinstance(prompt, str):
        if not prompt:
            raise InvalidRequest(f"prompt {index} is an empty string: there is nothing to continue")
        return ParsedPrompt(prompt, [])
    return ParsedPrompt(None, _token_ids(index, prompt))


def _token_ids(index: int, ids: Any) -> list[int]:
    if isinstance(ids, str | bytes) or not isinstance(ids, Sequence):
        raise InvalidRequest(f"prompt {index} is {type(ids).__name__}, not text or a list of token ids")
    if not ids:
        raise InvalidRequest(f"prompt {index} is empty: there is nothing to continue")
    token_ids = list(cast(Sequence[Any], ids))
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequest(f"prompt {index} contains {token_id!r}, which is not a token id")
    return token_ids


def check_request(prompt: ParsedPrompt, params: SamplingParams, vocab_size: int, engine: EngineInfo) -> None:
    """Refuse what could never run on this engine, with the numbers.

    Raises:
        RequestTooLarge: the prompt, or prompt and output together, don't fit the model's length or the KV cache.
        InvalidRequest: an id is outside the vocabulary.
    """
    ids = prompt.token_ids
    if not ids:
        raise InvalidRequest(f"the prompt {prompt.text!r} has no tokens: there is nothing to continue")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(f"the prompt contains token id {bad}, outside the vocabulary of {vocab_size}")
    if len(ids) >= engine.max_model_len:
        raise RequestTooLarge(
            f"the prompt has {len(ids)} tokens, which leaves no room for output: "
            f"max_model_len={engine.max_model_len} counts both"
        )
    length = min(engine.max_model_len, len(ids) + (params.max_tokens or engine.max_model_len))
    if length - 1 > engine.num_kv_tokens:
        raise RequestTooLarge(
            f"{len(ids)} prompt tokens and max_tokens={params.max_tokens} need KV cache for {length - 1} tokens; "
            f"this engine's holds {engine.num_kv_tokens} ({engine.num_blocks} blocks of {engine.block_size})"
        )
    for name, chosen in (
        ("stop_token_ids", params.stop_token_ids),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logit_bias", params.logit_bias),
    ):
        # one of each is all that matters, but a million of the same cost as much as a million
        if chosen is not None and len(chosen) > vocab_size:
            raise InvalidRequest(f"{name} has {len(chosen)} entries, and the vocabulary {vocab_size} tokens")
        for token_id in chosen or ():
            if token_id >= vocab_size:
                raise InvalidRequest(f"{name} contains {token_id}, outside the vocabulary of {vocab_size}")
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > vocab_size:
            raise InvalidRequest(f"{name}={count} is more than the vocabulary's {vocab_size} tokens")
