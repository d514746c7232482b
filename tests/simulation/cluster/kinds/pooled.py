"""Requests of an engine that pools: they get numbers instead of tokens. With `n`, several prompts in one call."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import msgspec

from raycore.llm import AsyncLLM
from raycore.messages import EngineRequest
from raycore.pooling_params import PoolingParams
from simulation.cluster.kinds.kind import Asked, Kind, Seen
from simulation.cluster.records import Record
from simulation.scenario import Request
from simulation.worker import expected


def _of_prompt(tokens: list[int], index: int) -> list[int]:
    """The tokens of one of the prompts of a call."""
    return tokens + [1 + index] * index


async def _encode(llm: AsyncLLM, asked: Asked, record: Record) -> AsyncIterator[Any]:
    request = record.request
    params = PoolingParams(task=request.wants["pooled"])
    arguments = {"priority": request.priority, **asked.arguments}
    if request.n == 1 and hasattr(llm, "encode"):  # API servers only make calls of several prompts
        made = [each async for each in llm.encode(asked.prompt, params, record.name, **arguments)]
    else:
        ids = [f"{record.name}-{index}" for index in range(request.n)] if request.n > 1 else [record.name]
        tokens = asked.prompt["prompt_token_ids"]
        prompts = [
            asked.prompt | ({} if tokens is None else {"prompt_token_ids": _of_prompt(tokens, index)})
            for index in range(request.n)
        ]
        made = await llm.encode_all(prompts, params, ids, **arguments)
    for sequence, output in zip(record.sequences, made, strict=True):
        sequence.pooled = output.outputs.data.tobytes()
        yield output


class _Pooled(Kind):
    name = "pooled"
    engine_share = 0.12
    request_share = 1.0
    excludes = (
        "added", "allowed tokens", "bad words", "constraint", "hidden states", "logprobs", "min tokens", "output kind",
        "pieces", "prompt logprobs", "stop tokens",
    )  # fmt: skip

    def options(self, draw: random.Random, options: Mapping[str, Any]) -> dict[str, Any] | None:
        return None if "speculative_config" in options else {"runner": "pooling"}

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> str:
        return "embed"

    def apply(self, value: str, request: Request, asked: Asked) -> None:
        asked.perform, asked.has_tokens, asked.can_fail, asked.is_cumulative = _encode, False, True, False
        asked.engine["pooling"] = PoolingParams(task=value)

    def sequence(self, value: str, record: Record, index: int, request: EngineRequest) -> EngineRequest:
        return msgspec.structs.replace(request, prompt_token_ids=_of_prompt(request.prompt_token_ids, index))

    def problems(self, value: str, seen: Seen) -> Iterator[str]:
        if seen.is_whole and seen.sequence.pooled is None:
            yield "has no result"
        elif seen.sequence.pooled is not None:
            right = expected.pooled(seen.shape, seen.request, seen.weights[0])
            if seen.sequence.pooled != right.data:
                yield f"its result is {seen.sequence.pooled.hex()}, not {right.data.hex()}"


KIND = _Pooled()
