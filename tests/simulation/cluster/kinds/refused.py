"""Requests that nothing can be made of. The error names the value."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from raycore.errors import InvalidRequest, RequestTooLarge
from raycore.llm import AsyncLLM
from raycore.lora.request import LoRARequest
from simulation.cluster.kinds.kind import VOCABULARY, Asked, Kind, generate
from simulation.cluster.records import Record
from simulation.scenario import Request


class _Mistake(NamedTuple):
    """What is wrong with a request."""

    make: Callable[[Asked], object]
    said: str
    """What the error has."""
    is_one: Callable[[Mapping[str, Any]], bool] = lambda options: True
    """Whether it is a mistake with these options of the engine."""
    error: type[BaseException] = InvalidRequest


def _generates(options: Mapping[str, Any]) -> bool:
    return options.get("runner") != "pooling"


async def _encode(llm: AsyncLLM, asked: Asked, record: Record) -> AsyncIterator[Any]:
    async for output in llm.encode(asked.prompt, None, record.name):
        yield output


_MISTAKES = {
    "an unknown token": _Mistake(
        lambda asked: asked.prompt.update(prompt_token_ids=[1, 2, VOCABULARY + 7]), str(VOCABULARY + 7)
    ),
    "no tokens": _Mistake(lambda asked: asked.prompt.update(prompt_token_ids=[]), "empty"),
    "too many tokens": _Mistake(
        lambda asked: asked.prompt.update(prompt_token_ids=[1] * 400), "400 tokens", error=RequestTooLarge
    ),
    "an unknown field": _Mistake(lambda asked: asked.prompt.update(colour="red"), "colour"),
    "an empty salt": _Mistake(lambda asked: asked.prompt.update(cache_salt=""), "cache_salt=''"),
    "an unknown rank": _Mistake(lambda asked: asked.arguments.update(data_parallel_rank=77), "data_parallel_rank=77"),
    "an unknown argument": _Mistake(lambda asked: asked.arguments.update(tokenization_kwargs={"colour": 1}), "colour"),
    "too many logprobs": _Mistake(lambda asked: asked.params.update(logprobs=999), "logprobs=999", _generates),
    "an unknown stop token": _Mistake(
        lambda asked: asked.params.update(stop_token_ids=[VOCABULARY + 9]), str(VOCABULARY + 9), _generates
    ),
    "a negative temperature": _Mistake(
        lambda asked: asked.params.update(temperature=-1.0), "temperature=-1.0", _generates
    ),
    "an adapter": _Mistake(
        lambda asked: asked.arguments.update(lora_request=LoRARequest("some", 1, "adapters/1")),
        "enable_lora",
        lambda options: not options.get("enable_lora"),
    ),
    "embeddings": _Mistake(
        lambda asked: asked.prompt.update(prompt_embeds=np.zeros((3, 3), np.float32)),
        "enable_prompt_embeds",
        lambda options: not options.get("enable_prompt_embeds"),
    ),
    "embeddings of another width": _Mistake(
        lambda asked: asked.prompt.update(prompt_embeds=np.zeros((3, 3), np.float32)),
        "[3, 3]",
        lambda options: bool(options.get("enable_prompt_embeds")),
    ),
    "a text": _Mistake(
        lambda asked: asked.prompt.update(prompt_token_ids=None, prompt="1 + 1 ="),
        "skip_tokenizer_init",
        lambda options: options.get("skip_tokenizer_init", True),
    ),
    "pooling": _Mistake(lambda asked: setattr(asked, "perform", _encode), "pooling", _generates),
    "generating": _Mistake(
        lambda asked: setattr(asked, "perform", generate), "'generate'", lambda options: not _generates(options)
    ),
}  # fmt: skip


class _Refused(Kind):
    name = "refused"
    engine_share = 0.3
    request_share = 0.2
    excludes = (
        "adapter", "added", "allowed tokens", "bad words", "cache salt", "constraint", "embeddings", "hidden states",
        "logprobs", "min tokens", "output kind", "pieces", "prompt logprobs", "stop tokens",
    )  # fmt: skip

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> str:
        return draw.choice([name for name, mistake in _MISTAKES.items() if mistake.is_one(options)])

    def apply(self, value: str, request: Request, asked: Asked) -> None:
        mistake = _MISTAKES[value]
        mistake.make(asked)
        asked.error = mistake.error, mistake.said


KIND = _Refused()
