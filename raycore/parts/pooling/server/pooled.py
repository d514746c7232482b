"""Runs a request's prompts on the engine, and makes the response of the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from raycore.client.ask import Ask
from raycore.outputs import PoolingOutput, PoolingRequestOutput
from raycore.pooling_params import PoolingParams
from raycore.server.contract.models import RequestModel
from raycore.server.contract.service import Context
from raycore.server.protocol import Routed

Result = PoolingRequestOutput[PoolingOutput]

_FEW_NUMBERS = 16_384
"""So many numbers are written on the event loop's thread. That takes no longer than a millisecond."""


class BytesAnswer(Response):
    """A response that isn't JSON."""

    media_type = "application/octet-stream"


Answer = dict[str, Any] | BytesAnswer
"""The body of a response that is JSON, or another response."""


@dataclass(frozen=True)
class PoolingJob:
    """A checked request. `answer()` runs it and returns the response."""

    context: Context
    request: Routed
    model: RequestModel
    id: str
    prompts: Sequence[dict[str, Any]]
    params: PoolingParams
    respond: Callable[[PoolingJob, list[Result]], Answer]
    """Makes the response of the prompts' results."""

    async def answer(self) -> Answer:
        """Run the request. If the call is cancelled, or a prompt fails, all prompts are aborted."""
        count, request = len(self.prompts), self.request
        ids = [self.id] if count == 1 else [f"{self.id}-{index}" for index in range(count)]
        asks = [
            Ask(prompt, self.params, name, request.priority, False, self.context.data_parallel_rank, self.model.lora)
            for prompt, name in zip(self.prompts, ids, strict=True)
        ]
        results = [each async for each in self.context.engine.ask(asks)]
        if sum(result.outputs.data.size for result in results) <= _FEW_NUMBERS:
            return self.respond(self, results)
        return await asyncio.to_thread(self.respond, self, results)

    def around(self, kind: str, data: list[dict[str, Any]], results: Sequence[Result]) -> dict[str, Any]:
        """A response in OpenAI's form. `kind` is the value of its field `object`."""
        return {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": self.model.name,
            "data": data,
            "usage": usage(results),
        }


def as_prompts(prompts: Sequence[list[int]], request: Routed) -> list[dict[str, Any]]:
    """A request's prompts, which are token ids, as the engine takes them."""
    return [with_salt({"prompt_token_ids": token_ids}, request) for token_ids in prompts]


def with_salt(prompt: dict[str, Any], request: Routed) -> dict[str, Any]:
    """A prompt that shares cached prefixes as its request says."""
    return {**prompt, "cache_salt": request.cache_salt}


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """OpenAI's usage object for a request, whose prompts had these results."""
    num_tokens = sum(len(result.prompt_token_ids) for result in results)
    return {
        "prompt_tokens": num_tokens,
        "completion_tokens": 0,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens or 0 for result in results)},
    }
