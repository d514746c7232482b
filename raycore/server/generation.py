"""Runs a request's prompts on the engine, and turns cumulative outputs into deltas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt, Prompt, PromptImages
from raycore.client.updates import Streaming
from raycore.client.watchers import Watcher
from raycore.config import EngineConfig
from raycore.control.calls import AsyncCalls
from raycore.errors import InvalidRequest, RequestFailed
from raycore.lora.request import LoRARequest
from raycore.messages import Feature, FeatureData
from raycore.metrics.view import MetricsView
from raycore.outputs import CompletionOutput, RequestOutput, SampleLogprobs, WeightVersionSpan
from raycore.parts.constraints.server import named
from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import SamplingParams
from raycore.server.beams import beam_params
from raycore.server.positions import OutputPieces
from raycore.server.protocol import SamplingRequest
from raycore.text.tokenizer import Tokenizer

T = TypeVar("T")


class ServingEngine(AsyncCalls, Protocol):
    """The engine interface that the server uses; `AsyncLLM` implements it."""

    def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[Any, None]:
        """Run requests, and yield their outputs: see `Streams.ask`. All prompts come this way.

        Outputs of a request that generates are cumulative, and the last one is finished.
        """
        ...

    def watch(self, watcher: Watcher) -> None:
        """Have somebody see the requests that come from now on."""
        ...

    def check(
        self, prompt_token_ids: list[int], sampling_params: SamplingParams, features: Sequence[Feature] = ()
    ) -> None:
        """Raise InvalidRequest if the request could never run, even on an idle engine. Thread-safe."""
        ...

    @property
    def pooling_spec(self) -> PoolingSpec | None:
        """What the model pools, and how; None if it generates."""
        ...

    @property
    def named_prompts(self) -> Mapping[str, str]:
        """What the checkpoint wants before texts, by name, such as `query`. Empty: it says nothing of that."""
        ...

    def check_pooling(self, prompt_token_ids: list[int], pooling_params: PoolingParams) -> None:
        """Raise InvalidRequest if the request could never run, even on an idle engine. Thread-safe."""
        ...

    def get_tokenizer(self) -> Tokenizer: ...

    @property
    def config(self) -> EngineConfig:
        """The engine's configuration."""
        ...

    async def abort_requests(self, request_ids: Sequence[str] | None) -> int:
        """Abort requests of all API servers. None: all of them. Returns how many of the engine's there were.

        Ids are those of the engine's requests, or of responses, whose prompts are requests of their own.
        """
        ...

    @property
    def images(self) -> PromptImages:
        """Makes prompts with images."""
        ...

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """The sampling parameters that the checkpoint sets, for those that a request doesn't set."""
        ...

    @property
    def max_http_logprobs(self) -> int:
        """Maximum number of log probabilities per token that an HTTP request may ask for. -1: no maximum."""
        ...

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request's prompt and output together."""
        ...

    @property
    def unavailable_reason(self) -> str | None:
        """Why the engine refuses requests; None if it accepts them."""
        ...

    def read_metrics(self) -> MetricsView:
        """The engine's current metrics."""
        ...


@dataclass(frozen=True)
class Job:
    """One prompt of a request, with all that the engine needs to run it."""

    token_ids: list[int]
    params: SamplingParams
    request_id: str
    priority: int = 0
    constraint_param: str = "structured_outputs"
    """The request's field that set `params.structured_outputs`. Errors name this field."""
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    """The rank that runs the prompt; None: any rank."""
    lora: LoRARequest | None = None
    """The adapter that the request uses."""
    features: Sequence[Feature] = ()
    """Where images or embeddings are in the prompt."""
    feature_data: Sequence[FeatureData] = ()
    """What these are encoded from."""
    has_unknown_tokens: bool = False
    """Whether the prompt is given as embeddings."""
    beams: BeamSearchParams | None = None
    """The request asks for the best sequences of a beam search. None: it doesn't."""
    tells_tokens: bool = True
    """Whether a streamed response tells more of the tokens than their text."""

    @staticmethod
    def of(
        request: SamplingRequest,
        token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        max_model_len: int,
        constraint_param: str = "structured_outputs",
        lora: LoRARequest | None = None,
    ) -> Job:
        """The job for one of a request's prompts."""
        return Job(
            token_ids,
            params,
            request_id,
            request.priority,
            constraint_param,
            request.cache_salt,
            request.data_parallel_rank,
            lora,
            beams=beam_params(request, params, constraint_param, max_model_len),
            tells_tokens=request.return_token_ids or params.num_logprobs is not None,
        )


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

    `finish_reason`, `stop_reason` and `weight_versions` are set only in the part with which the sequence finishes.
    """

    text: str
    token_ids: list[int]
    logprobs: SampleLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: list[WeightVersionSpan] | None


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
    if job.beams is not None and job.params.logprobs is None:
        for sequence in last.outputs:
            sequence.logprobs = None
    return last


def _prompt(job: Job) -> Prompt | ParsedPrompt:
    if not job.features:
        return {"prompt_token_ids": job.token_ids, "cache_salt": job.cache_salt}
    return ParsedPrompt(
        None,
        job.token_ids,
        job.cache_salt,
        features=job.features,
        feature_data=job.feature_data,
        has_unknown_tokens=job.has_unknown_tokens,
    )


def _outputs(engine: ServingEngine, job: Job, *, stream: Streaming) -> AsyncGenerator[RequestOutput, None]:
    params = job.params if job.beams is None else job.beams
    ask = Ask(_prompt(job), params, job.request_id, job.priority, stream, job.data_parallel_rank, job.lora)
    outputs = engine.ask([ask])
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
