"""Prompts that come as a stream of pieces. Each piece's outputs are a sequence of the record."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from raycore.inputs import StreamingInput
from raycore.llm import AsyncLLM
from raycore.messages import EngineRequest
from raycore.sampling_params import SamplingParams
from raycore.system import asyncio
from simulation.cluster.kinds.kind import Asked, Kind, tokens_of
from simulation.cluster.records import Record, Sequence
from simulation.scenario import Request

if TYPE_CHECKING:
    from simulation.cluster.operations.contract import History

_LONGEST_PROMPT, _MOST_TOKENS = 110, 16


async def _stream(name: str, llm: AsyncLLM, asked: Asked, record: Record) -> AsyncIterator[Any]:
    request = record.request

    async def pieces() -> AsyncIterator[StreamingInput]:
        yield StreamingInput(asked.prompt)  # pyright: ignore[reportArgumentType]
        for delay_s, text, count in request.wants[name]:
            await asyncio.sleep(delay_s)
            yield StreamingInput(tokens_of([(text, count)]))

    outputs = llm.generate(
        pieces(),
        SamplingParams(**asked.params),
        record.name,
        request.priority,
        stream=request.is_stream,
        **asked.arguments,
    )
    length = 0
    async for output in outputs:
        if length and len(output.prompt_token_ids) != length:  # of the next piece
            record.sequences.append(Sequence())
        length = len(output.prompt_token_ids)
        index = len(record.sequences) - 1
        yield replace(output, outputs=[replace(part, index=index) for part in output.outputs])


class Pieces(Kind):
    """Prompts in pieces, as far as time doesn't matter."""

    excludes = ("added", "embeddings", "hidden states", "pooled", "prompt logprobs", "refused")

    def delays(self, draw: random.Random) -> list[float]:
        """After how many seconds a piece may come."""
        return [0.0, 0.0, round(draw.uniform(0.0, 1.0), 4)]

    def draw(self, draw: random.Random, request: Request, options: Mapping[str, Any]) -> list[list[Any]] | None:
        """(after how many seconds, text, number of tokens) of each piece after the first one."""
        length = sum(count for _, count in request.prompt)
        if request.n > 1 or length > _LONGEST_PROMPT or request.max_tokens > _MOST_TOKENS:
            return None
        delays = self.delays(draw)
        return [
            [draw.choice(delays), draw.randrange(2, 1000), draw.choice([1, 3, 17])]
            for _ in range(draw.choice([0, 1, 2, 3]))
        ]

    def simpler(self, value: list[list[Any]]) -> Iterator[Any]:
        if value:
            yield value[:-1]

    def waits_s(self, value: list[list[Any]]) -> float:
        return sum(delay_s for delay_s, _, _ in value)

    def apply(self, value: list[list[Any]], request: Request, asked: Asked) -> None:
        asked.perform, asked.is_cumulative = partial(_stream, self.name), False

    def sequence(self, value: list[list[Any]], record: Record, index: int, request: EngineRequest) -> EngineRequest:
        prompt = request.prompt_token_ids
        for before, (_, text, count) in zip(record.sequences[:index], value, strict=False):
            prompt = [*prompt, *before.tokens[:-1], *tokens_of([(text, count)])]
        return msgspec.structs.replace(request, prompt_token_ids=prompt, seed=record.request.seed or 0)

    def problems_at_end(self, value: list[list[Any]], record: Record, history: History) -> Iterator[str]:
        if len(record.sequences) != 1 + len(value):
            yield f"had outputs of {len(record.sequences)} pieces of {1 + len(value)}"


class _Soon(Pieces):
    name = "pieces"
    engine_share = 0.25


KIND = _Soon()
