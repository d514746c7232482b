"""Runs a request's prompts on the engine, and makes the response of the results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response

from raycore.outputs import PoolingOutput, PoolingRequestOutput
from raycore.pooling_params import PoolingParams
from raycore.server.generation import ServingEngine
from raycore.server.models import Model
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
class Job:
    """One prompt of a request, with all that the engine needs to run it."""

    prompt: dict[str, Any]
    params: PoolingParams


@dataclass(frozen=True)
class Pooled:
    """A checked request. `answer()` runs it and returns the response."""

    engine: ServingEngine
    request: Routed
    model: Model
    id: str
    jobs: Sequence[Job]
    respond: Callable[[Pooled, list[Result]], Answer]
    """Makes the response of the jobs' results."""

    async def answer(self) -> Answer:
        """Run the request. If the call is cancelled, or a job fails, all jobs are aborted."""
        tasks = [asyncio.ensure_future(self._run(index)) for index in range(len(self.jobs))]
        try:
            results = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        if sum(result.outputs.data.size for result in results) <= _FEW_NUMBERS:
            return self.respond(self, results)
        return await asyncio.to_thread(self.respond, self, results)

    async def _run(self, index: int) -> Result:
        job = self.jobs[index]
        outputs = self.engine.encode(
            job.prompt,
            job.params,
            self.id if len(self.jobs) == 1 else f"{self.id}-{index}",
            self.model.lora,
            self.request.priority,
            data_parallel_rank=self.request.data_parallel_rank,
        )
        async with aclosing(outputs):
            return await anext(outputs)

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


def jobs_of(prompts: Sequence[list[int]], request: Routed, params: PoolingParams) -> list[Job]:
    """The jobs of a request's prompts, which are token ids."""
    return [job_of({"prompt_token_ids": token_ids}, request, params) for token_ids in prompts]


def job_of(prompt: dict[str, Any], request: Routed, params: PoolingParams) -> Job:
    """The job of one of a request's prompts."""
    return Job({**prompt, "cache_salt": request.cache_salt}, params)


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """OpenAI's usage object for a request, whose prompts had these results."""
    num_tokens = sum(len(result.prompt_token_ids) for result in results)
    return {
        "prompt_tokens": num_tokens,
        "completion_tokens": 0,
        "total_tokens": num_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(result.num_cached_tokens or 0 for result in results)},
    }
