"""Runs a request's prompts on the engine, and turns cumulative outputs into deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt
from raycore.client.updates import Streaming
from raycore.errors import InvalidRequest, RequestFailed
from raycore.lora.request import LoRARequest
from raycore.outputs import CompletionOutput, RequestOutput, SampleLogprobs, WeightVersionSpan
from raycore.parts.constraints.server import named
from raycore.sampling_params import SamplingParams
from raycore.server.contract.engine import ServingEngine
from raycore.server.contract.service import Context
from raycore.server.generation.beams import beam_params
from raycore.server.generation.positions import OutputPieces
from raycore.server.protocol import Routed, SamplingRequest

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """One prompt of a request that generates, and what the response needs to know of it."""

    ask: Ask
    """What the engine runs. Its prompt is parsed."""
    params: SamplingParams
    """Those of `ask`. Of a beam search, how many sequences there are, and what is shown of them."""
    constraint_param: str = "structured_outputs"
    """The request's field that set `params.structured_outputs`. Errors name this field."""
    tells_tokens: bool = True
    """Whether streamed chunks carry token ids or log probabilities."""

    @staticmethod
    def of(
        context: Context,
        request: Routed,
        prompt: ParsedPrompt,
        params: SamplingParams,
        request_id: str,
        lora: LoRARequest | None = None,
        constraint_param: str = "structured_outputs",
    ) -> Job:
        """The job for one of a request's prompts. `params` has the request's sampling parameters."""
        rank, asked, tells_tokens = context.data_parallel_rank, params, True
        if isinstance(request, SamplingRequest):
            asked = beam_params(request, params, constraint_param, context.engine.max_model_len) or params
            tells_tokens = request.return_token_ids or params.num_logprobs is not None
        prompt = replace(prompt, cache_salt=request.cache_salt)
        ask = Ask(prompt, asked, request_id, request.priority, data_parallel_rank=rank, lora=lora)
        return Job(ask, params, constraint_param, tells_tokens)

    @property
    def prompt(self) -> ParsedPrompt:
        return self.ask.parsed

    @property
    def request_id(self) -> str:
        return self.ask.request_id

    def with_params(self, params: SamplingParams, constraint_param: str) -> Job:
        """The same job with other parameters; it isn't a beam search."""
        ask = msgspec.structs.replace(self.ask, params=params)
        return replace(self, ask=ask, params=params, constraint_param=constraint_param)


async def run(engine: ServingEngine, jobs: Sequence[Job]) -> list[RequestOutput]:
    """Run jobs concurrently, and return their final outputs, in the order of `jobs`.

    If a job fails or the call is cancelled, all jobs are aborted.
    """
    return await gathered([_last(engine, job) for job in jobs])


async def gathered(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls concurrently, and return their results, in their order.

    If a call fails or this one is cancelled, all are cancelled.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def run_streaming(engine: ServingEngine, jobs: Sequence[Job]) -> AsyncGenerator[RequestOutput, None]:
    """Run jobs concurrently. Yields each job's output so far, under the job's `request_id`, as outputs arrive.

    Closing the iterator aborts unfinished jobs. A slow consumer gets only the latest output of each job.
    """
    streams = [_outputs(engine, job, stream=True if job.tells_tokens else "text") for job in jobs]
    return streams[0] if len(streams) == 1 else _merged(streams)


async def _merged(streams: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[RequestOutput, None]:
    waiting: dict[int, RequestOutput] = {}  # the latest output of each stream; outputs are cumulative
    ended: list[asyncio.Task[None]] = []
    arrived = asyncio.Event()

    async def collect(index: int, stream: AsyncGenerator[RequestOutput, None]) -> None:
        async for output in stream:
            waiting[index] = output
            arrived.set()

    def note_end(task: asyncio.Task[None]) -> None:
        ended.append(task)
        arrived.set()

    tasks = [asyncio.ensure_future(collect(index, stream)) for index, stream in enumerate(streams)]
    for task in tasks:
        task.add_done_callback(note_end)
    num_running = len(tasks)
    try:
        while num_running or waiting:
            await arrived.wait()
            arrived.clear()
            for index in list(waiting):
                yield waiting.pop(index)
            while ended:
                num_running -= 1
                ended.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(slots=True)
class New:
    """The part of a sequence's output that follows the previous part.

    What comes after `logprobs` is set only in the part with which the sequence finishes.
    """

    text: str
    token_ids: list[int]
    logprobs: SampleLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[WeightVersionSpan] | None
    routed_experts: NDArray[np.generic] | None


class Progress:
    """How much of a sequence's output has been sent."""

    def __init__(self) -> None:
        self.is_begun = False
        """Whether any part of the output has been sent to the client."""
        self.pieces: OutputPieces | None = None
        """What the next tokens add to the text, for `logprobs.text_offset`. None: no token has been sent."""
        self._num_characters = 0
        self._num_tokens = 0
        self._is_finished = False

    def advance(self, output: CompletionOutput) -> New:
        """The part of `output` that is new since the previous call. `output` is cumulative."""
        new = New(
            output.text[self._num_characters :],
            output.token_ids[self._num_tokens :],
            None if output.logprobs is None else output.logprobs[self._num_tokens :],
            None if self._is_finished else output.finish_reason,
            None if self._is_finished else output.stop_reason,
            None if self._is_finished else output.weight_versions,
            None if self._is_finished else output.routed_experts,
        )
        self._is_finished = output.finish_reason is not None
        self._num_characters = len(output.text)
        self._num_tokens = len(output.token_ids)
        return new


def usage(prompt_outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """OpenAI's usage object for a request. `prompt_outputs`: the output so far of each of its prompts."""
    num_prompt = sum(len(output.prompt_token_ids) for output in prompt_outputs)
    num_output = sum(len(completion.token_ids) for output in prompt_outputs for completion in output.outputs)
    num_cached = sum(output.num_cached_tokens or 0 for output in prompt_outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


async def _last(engine: ServingEngine, job: Job) -> RequestOutput:
    async with aclosing(_outputs(engine, job, stream=False)) as outputs:
        last = await anext(outputs)
    assert last.finished
    if isinstance(job.ask.params, BeamSearchParams) and job.params.logprobs is None:
        for sequence in last.outputs:
            sequence.logprobs = None
    return last


def _outputs(engine: ServingEngine, job: Job, *, stream: Streaming) -> AsyncGenerator[RequestOutput, None]:
    outputs = engine.ask([msgspec.structs.replace(job.ask, stream=stream)])
    return outputs if job.params.structured_outputs is None else _naming_constraint(outputs, job.constraint_param)


async def _naming_constraint(
    outputs: AsyncGenerator[RequestOutput, None], param: str
) -> AsyncGenerator[RequestOutput, None]:
    """Pass on the outputs. Makes an error about the constraint name `param`, the request's field that set it."""
    async with aclosing(outputs):
        try:
            async for output in outputs:
                yield output
        except (InvalidRequest, RequestFailed) as error:
            raise (named(error, param) if str(error).startswith("structured_outputs") else error) from error
