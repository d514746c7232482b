"""The public classes: `LLM`, whose calls block, and `AsyncLLM`, for asyncio."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

# imported before any module that imports Ray, because this import silences Ray's message about missing widgets
from raycore.display.progress_bars import RequestBar, request_bar
from raycore.system import asyncio, os, threading, time, uuid

# isort: split

from raycore.beam_search import BeamSearchOutput, BeamSearchParams
from raycore.client.ask import Ask, id_or_new
from raycore.client.beams import BeamSearch
from raycore.client.collector import Collector
from raycore.client.group import ClientGroup
from raycore.client.inputs import (
    ParsedPrompt,
    Prompt,
    adapters_for_each,
    checked_beam_params,
    checked_params,
    checked_request_id,
    parse_prompts,
)
from raycore.client.queue_calls import QueueCalls
from raycore.client.rendering import Adapters, Messages, chat_prompts, completion_prompts
from raycore.client.step_queue import StepQueue
from raycore.client.streamed_prompts import generate_streamed
from raycore.client.streams import RequestStream
from raycore.client.tokenization import Tokenization
from raycore.client.updates import Streaming
from raycore.config import ENGINE_OPTIONS, EngineConfig, ModelConfig
from raycore.control.calls import AsyncCalls, EngineCalls, check_seconds
from raycore.errors import EngineDeadError, InvalidRequest
from raycore.inputs import StreamingInput
from raycore.llm_engine import LLMEngine
from raycore.lora.request import LoRARequest
from raycore.node.threads import on_own_thread
from raycore.options.declared import with_options
from raycore.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from raycore.parts.pooling.client.pooling import supported_tasks
from raycore.parts.pooling.client.pooling_calls import PoolingCalls
from raycore.pooling_params import PoolingParams, PoolingTask
from raycore.running_engine import RunningEngine
from raycore.sampling_params import RequestOutputKind, SamplingParams, checked_int
from raycore.short_tracebacks import ends_traceback
from raycore.text.hf_tokenizer import HfTokenizer
from raycore.text.template_file import read_chat_template

if TYPE_CHECKING:
    from types import TracebackType

    from ray.util.placement_group import PlacementGroup
    from typing_extensions import Unpack

    from raycore.options.types import EngineOptions

logger = logging.getLogger(__name__)

_AsyncT = TypeVar("_AsyncT", bound="AsyncLLM")
_DRAIN_POLL_S = 0.02


class LLM(RunningEngine, QueueCalls, PoolingCalls, EngineCalls):
    """An engine with a blocking interface.

    ::

        with LLM("path/to/checkpoint", data_parallel_size=2) as llm:
            for output in llm.generate(["Hello, my name is"], SamplingParams(max_tokens=32)):
                print(output.outputs[0].text)
    """

    @with_options(ENGINE_OPTIONS)
    @ends_traceback
    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        chat_template: str | os.PathLike[str] | None = None,
        placement_groups: Sequence[PlacementGroup] | None = None,
        use_tqdm_on_load: bool = True,
        **options: Unpack[EngineOptions],
    ) -> None:
        """Start the engine and wait until it can serve.

        `chat_template`: Jinja text, or a file with it, for conversations whose calls give no template. None: the
        checkpoint's. The other arguments and the errors are those of `RunningEngine`.
        """
        template = read_chat_template(chat_template)  # before the engine starts, which can take minutes
        super().__init__(
            model, tokenizer, placement_groups=placement_groups, use_tqdm_on_load=use_tqdm_on_load, **options
        )
        self._client.chat_template = template

    @ends_traceback
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        priority: int | Sequence[int] | None = None,
        lora_request: Adapters = None,
        *,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or more prompts. Returns when all are finished.

        Args:
            prompts: one prompt or a list. A prompt is text, token ids, `{"prompt": text}` or
                `{"prompt_token_ids": ids}`. Prompts with a `"cache_salt"` share cached prefixes only with prompts
                that have the same one. For models that take images, `"multi_modal_data": {"image": ...}` has an
                image, embeddings, or a list of them (docs/images.md).
            sampling_params: one for all prompts, or one per prompt. None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar with tokens per second. A callable, such as a subclass of tqdm, makes the bar.
            priority: one for all prompts, or one per prompt; lower values run first. Needs
                `scheduling_policy="priority"`.
            lora_request: an adapter for all prompts, or one per prompt, where None means none. Needs `enable_lora`.
            tokenization_kwargs: may have `truncate_prompt_tokens`, `truncation_side` (`left` or `right`) and
                `add_special_tokens`.
            mm_processor_kwargs: settings of the image processor, for prompts with images that have none.

        Returns: one output per prompt, in order.

        Raises:
            InvalidRequest: a prompt or parameter is unusable; the message names it. Nothing was run.
            RequestFailed: a request failed, but the engine didn't. The exception has the outputs of the other requests
                in `outputs`.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        parsed = completion_prompts(self._client, prompts, tokenization_kwargs, mm_processor_kwargs)
        return self._run(self._asks(parsed, sampling_params, lora_request, priority), use_tqdm)

    def get_world_size(self, include_dp: bool = True) -> int:
        """Number of workers the engine was started with: of all ranks, or without `include_dp`, of one."""
        parallel = self.config.parallel
        return parallel.world_size * (parallel.data_parallel_size if include_dp else 1)

    def get_tokenizer(self) -> HfTokenizer:
        """The engine's tokenizer, with Hugging Face's calls."""
        return HfTokenizer.of(self._client.tokenizer)

    @property
    def llm_engine(self) -> LLMEngine:
        """The same engine for callers who add requests and fetch outputs step by step."""
        return LLMEngine(self, self._queue)

    @ends_traceback
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        priority: int = 0,
        lora_request: LoRARequest | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Continue one prompt. Yields outputs, cumulative ones unless `output_kind` says otherwise; the last one is
        `finished`.

        Leaving the iteration early aborts the request. A slow consumer doesn't get every output, but each output has
        the whole text so far, or, with `RequestOutputKind.DELTA`, what is new since the consumer's previous output.

        Raises:
            InvalidRequest: the prompt or a parameter is unusable. Raised at the first step of the iteration.
            RequestFailed: the request failed, but the engine didn't.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        (parsed,) = parse_prompts([prompt], self._client.tokenizer, images=self._client.images)
        (ask,) = self._asks([parsed], sampling_params, lora_request, priority)
        is_streamed = checked_params(ask.params).output_kind is not RequestOutputKind.FINAL_ONLY
        queue = StepQueue(self._client)
        try:
            queue.add([msgspec.structs.replace(ask, stream=is_streamed)])
            while queue.num_unfinished:
                for output in queue.step(wait_s=None):
                    assert isinstance(output, RequestOutput)
                    yield output
        finally:
            # for an iteration that was left early or interrupted; has no effect on a finished request
            queue.abort([ask.request_id])

    @ends_traceback
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: Adapters = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, rendered with the model's chat template.

        Args:
            messages: `[{"role": "user", "content": "…"}, …]`, or a list of such lists. They are
                normalized as in a chat request to the server (`raycore.text.conversation`). Contents may have images:
                parts of type `image_url`, `image_pil` or `image_embeds`.
            chat_template_content_format: no effect: the format is detected from the template.
            mm_processor_kwargs: settings of the image processor.

        The other arguments are those of `generate()`, and variables of templates.
        """
        parsed = chat_prompts(
            self._client,
            messages,
            chat_template=chat_template,
            chat_template_content_format=chat_template_content_format,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
        )
        return self._run(self._asks(parsed, sampling_params, lora_request, priority), use_tqdm)

    @ends_traceback
    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Return the most likely continuations of one or more prompts.

        Every token of every beam is a request of its own, of which prefix caching makes most tokens free.

        Args:
            prompts: as in `generate`.
            lora_request: an adapter for all prompts, or one per prompt, where None means none. Needs `enable_lora`.
            use_tqdm: show a progress bar of prompts.
            concurrency_limit: how many prompts are searched at a time. None: all.

        Returns: the `params.beam_width` best sequences of each prompt, in order.

        Raises:
            InvalidRequest: a prompt or parameter is unusable; the message names it. Nothing was run.
            RequestFailed: a request failed, but the engine didn't.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        if concurrency_limit is not None and checked_int("concurrency_limit", concurrency_limit) < 1:
            raise InvalidRequest(f"concurrency_limit={concurrency_limit} isn't at least 1")
        parsed = completion_prompts(self._client, prompts)
        adapters = adapters_for_each(lora_request, len(parsed))
        asks = [
            Ask(prompt, params, uuid.uuid4().hex, lora=adapter)
            for prompt, adapter in zip(parsed, adapters, strict=True)
        ]
        searches = [self._client.checks.beam_search(ask) for ask in asks]
        at_a_time = max(1, concurrency_limit or len(searches))
        with request_bar(len(searches), use_tqdm) as bar:
            for first in range(0, len(searches), at_a_time):
                some = slice(first, first + at_a_time)
                with ExitStack() as ends:
                    watches = [ends.enter_context(self._client.watchers.watch([ask])) for ask in asks[some]]
                    self._search(searches[some], bar)
                    for watch, search in zip(watches, searches[some], strict=True):
                        watch.note(search.output(self._client.tokenizer))
        return [BeamSearchOutput(search.sequences(self._client.tokenizer)) for search in searches]

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def _search(self, running: Sequence[BeamSearch], bar: RequestBar) -> None:
        """Run beam searches until all have ended."""
        while running:
            steps = [search.asks for search in running]
            asks = [ask for step in steps for ask in step]  # nobody watches these: they are parts of a request
            outputs = iter(Collector().run(self._client, asks, False, lambda: 0))
            for search, step in zip(running, steps, strict=True):
                search.take(list(islice(outputs, len(step))))
            num_before = len(running)
            running = [search for search in running if search.asks]
            bar.update(num_before - len(running))

    def _run(self, asks: Sequence[Ask], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        num_tokens, watchers = lambda: self._client.num_output_tokens, self._client.watchers
        return Collector().run(self._client, asks, use_tqdm, num_tokens, watchers=watchers) if asks else []


class UnfinishedRequests:
    """Counts an engine's unfinished requests."""

    def __init__(self, clients: ClientGroup) -> None:
        self._clients = clients

    def get_num_unfinished_requests(self) -> int:
        """Number of unfinished requests, of all clients of the engine."""
        return self._clients.num_unfinished_requests

    def has_unfinished_requests(self) -> bool:
        """Whether there are any."""
        return self._clients.num_unfinished_requests > 0


class AsyncLLM(RunningEngine, AsyncCalls):
    """An engine with an asynchronous interface. Several event loops may share it.

    The constructor blocks until the engine can serve. Inside a running event loop, use `create()`.
    """

    @classmethod
    @with_options(ENGINE_OPTIONS)
    @ends_traceback
    async def create(
        cls: type[_AsyncT],
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        placement_groups: Sequence[PlacementGroup] | None = None,
        use_tqdm_on_load: bool = True,
        **options: Unpack[EngineOptions],
    ) -> _AsyncT:
        """Start an engine without blocking the event loop, for async actors and servers.

        The arguments and errors are those of the class. If the call is cancelled, it stops the engine that it was
        starting, and raises CancelledError when the engine's processes have ended.

        ::

            async with await AsyncLLM.create("path/to/checkpoint") as llm: ...
        """
        cancelled = threading.Event()
        make = partial(
            cls,
            model,
            tokenizer,
            placement_groups=placement_groups,
            use_tqdm_on_load=use_tqdm_on_load,
            _is_wanted=lambda: not cancelled.is_set(),
            **options,
        )
        # not in a task: a loop that ends would cancel the task, but the task's thread would go on unnoticed
        starting = asyncio.get_running_loop().run_in_executor(None, make)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            cancelled.set()
            await asyncio.wait([starting])
            if starting.exception() is None:
                await asyncio.to_thread(starting.result().shutdown)
            raise

    @ends_traceback
    def generate(
        self,
        prompt: Prompt | AsyncIterator[StreamingInput],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        stream: Streaming = True,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        prompt_text: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt. Yields outputs, cumulative ones unless `output_kind` says otherwise; the last one is
        `finished`.

        Leaving the iteration early aborts the request. A slow consumer doesn't get every output, but each output has
        the whole text so far, or, with `RequestOutputKind.DELTA`, what is new since the consumer's previous output.

        Args:
            prompt: as in `LLM.generate()`; or an asynchronous generator of `StreamingInput`, whose pieces make one
                prompt. The prompt so far is continued after each piece, up to its `max_tokens`. The next piece follows
                what was generated, without the last token of that. Pieces after the first get no special tokens.
                Outputs are those of a piece; only the very last one is `finished`.
            request_id: must not be the id of another unfinished request. None: a random id.
            priority: lower values run first. Needs `scheduling_policy="priority"`.
            stream: False yields only the final output, which costs less. `text`: beside the first and the final output,
                those with new text, so without those of tokens that don't complete a character or have no text.
            data_parallel_rank: the rank that gets the request. None: raycore chooses one by load and cached prefixes.
                Another rank gets the request if the given one is being replaced, is lost, or has no weights to serve
                with.
            lora_request: the adapter that the request uses. Needs `enable_lora`.
            tokenization_kwargs: may have `truncate_prompt_tokens`, `truncation_side` (`left` or `right`) and
                `add_special_tokens`.
            trace_headers: HTTP headers. `traceparent` names the span that those of this request are parts of, with
                `otlp_traces_endpoint`. Without it, that is the current span.
            prompt_text: no effect.

        Raises:
            InvalidRequest: the prompt or a parameter is unusable. Raised at the first step of the iteration.
            RequestFailed: the request failed, but the engine didn't.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        params = checked_params(sampling_params or self.get_default_sampling_params())
        is_streamed = isinstance(prompt, AsyncIterator)
        ask = Ask(
            "" if is_streamed else prompt,
            params,
            id_or_new(request_id),
            priority,
            stream=stream,
            data_parallel_rank=data_parallel_rank,
            lora=lora_request,
            tokenization=Tokenization.of(None, tokenization_kwargs, self.max_model_len),
            trace_headers=trace_headers or {},
        )
        return generate_streamed(self._streams, prompt, ask) if is_streamed else self._streams.ask([ask])

    @ends_traceback
    async def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
    ) -> RequestStream[RequestOutput] | RequestStream[PoolingRequestOutput[PoolingOutput]]:
        """Add a request, and return what gives its outputs: `await stream.get()`.

        The outputs are those of `generate()` or `encode()`. Unlike with these, the request runs whether or not its
        outputs are taken, until `stream.close()`.

        Args:
            params: of the kind that fits the model.
            arrival_time: no effect: the request arrives now.

        The other arguments and the errors are those of `generate()`.
        """
        how = Tokenization.of(None, tokenization_kwargs, self.max_model_len)
        return await self._streams.add(
            Ask(prompt, params, request_id, priority, True, data_parallel_rank, lora_request, how, trace_headers or {})
        )

    @ends_traceback
    async def beam_search(
        self,
        prompt: Prompt | ParsedPrompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        priority: int = 0,
        *,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> RequestOutput:
        """Return the most likely continuations of one prompt, as the sequences of one output, the best one first.

        Cancelling the call aborts the search. The arguments and errors are those of `generate`.
        """
        asked = checked_beam_params(params)
        ask = Ask(prompt, asked, id_or_new(request_id), priority, False, data_parallel_rank, lora_request)
        (output,) = [each async for each in self._streams.ask([ask])]
        return output

    async def encode(
        self,
        prompt: Prompt | ParsedPrompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        tokenization_kwargs: dict[str, Any] | None = None,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pool one prompt. Yields one output. Needs a model that pools.

        Leaving the iteration early aborts the request.

        Args:
            pooling_params: None: the model's defaults.
            request_id: must not be the id of another unfinished request. None: a random id.
            lora_request: the adapter that the request uses. Needs `enable_lora`.
            trace_headers: as in `generate()`.
            priority: lower values run first. Needs `scheduling_policy="priority"`.
            pooling_task: one of `get_supported_tasks()`. None: that of `pooling_params`, or else the first one.
            truncate_prompt_tokens: the end of a prompt with more tokens is cut off. -1: with more than
                `max_model_len`. None: such a prompt is refused.
            tokenization_kwargs: may have `truncate_prompt_tokens`, `truncation_side` (`left` or `right`) and
                `add_special_tokens`.
            data_parallel_rank: as in `generate()`.

        Raises:
            InvalidRequest: the prompt or a parameter is unusable, or the model doesn't support the task. Raised at the
                first step of the iteration.
            RequestFailed: the request failed or was aborted, but the engine didn't fail.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        (result,) = await self.encode_all(
            [prompt],
            pooling_params,
            None if request_id is None else [request_id],
            lora_request,
            priority,
            pooling_task=pooling_task,
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
            trace_headers=trace_headers,
        )
        yield result

    @ends_traceback
    async def encode_all(
        self,
        prompts: Sequence[Prompt | ParsedPrompt],
        pooling_params: PoolingParams | None = None,
        request_ids: Sequence[str] | None = None,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        *,
        pooling_task: PoolingTask | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        data_parallel_rank: int | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pool several prompts with the same parameters. Costs less than as many calls of `encode`.

        If one of them fails, or the call is cancelled, all are aborted. The arguments and errors are those of `encode`.

        Returns: one output for each prompt, in order.
        """
        given = [uuid.uuid4().hex for _ in prompts] if request_ids is None else request_ids
        ids = [checked_request_id(request_id) for request_id in given]
        params = self._client.checks.resolved_pooling(pooling_params, pooling_task)
        how = Tokenization.of(truncate_prompt_tokens, tokenization_kwargs, self.max_model_len)
        if len(set(ids)) != len(prompts):
            raise InvalidRequest(f"{len(set(ids))} different request_ids for {len(prompts)} prompts: give one for each")
        asks = [
            Ask(
                *(prompt, params, request_id, priority, False, data_parallel_rank, lora_request, how),
                trace_headers=trace_headers or {},
            )
            for prompt, request_id in zip(prompts, ids, strict=True)
        ]
        return [each async for each in self._streams.ask(asks)] if asks else []

    def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[Any, None]:
        """What the calls above do, with their arguments as values: see `Streams.ask`."""
        return self._streams.ask(asks)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the engine can be asked for, the default first: `generate`, or those of a model that pools."""
        return supported_tasks(self._client.checks.pooling)

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Abort a request, or several. Their iterators end with outputs whose `finish_reason` is `abort`.

        Ignores unknown ids. `internal` has no effect.
        """
        self._client.abort([request_id] if isinstance(request_id, str) else list(request_id), notify=True)

    @property
    def is_running(self) -> bool:
        """Whether the engine accepts requests."""
        return self.unavailable_reason is None

    @property
    def is_stopped(self) -> bool:
        """Whether the engine has failed or was shut down."""
        return self.errored

    @property
    def errored(self) -> bool:
        """Whether the engine has failed or was shut down."""
        return self._client.failure is not None

    @property
    def dead_error(self) -> BaseException:
        """Why the engine has failed, or that it was shut down. While it runs, that it does."""
        return self._client.failure or EngineDeadError("the engine has not failed")

    @property
    def output_processor(self) -> UnfinishedRequests:
        """Counts the unfinished requests, of all clients of the engine."""
        return UnfinishedRequests(self.clients)

    def get_num_unfinished_requests(self) -> int:
        """Number of unfinished requests, of all clients of the engine."""
        return self.num_unfinished_requests

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Wait until no request is unfinished. Requests that come meanwhile are waited for, too.

        Args:
            drain_timeout: seconds to wait.

        Raises:
            TimeoutError: requests are unfinished after that time. They go on.
            EngineDeadError: the engine has failed or was shut down.
        """
        check_seconds("drain_timeout", drain_timeout)
        deadline = time.monotonic() + drain_timeout
        while self.num_unfinished_requests:
            if self._client.failure is not None:
                raise self._client.failure
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"{self.num_unfinished_requests} requests are unfinished after drain_timeout={drain_timeout:g} s"
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    @property
    def vllm_config(self) -> EngineConfig:
        """The engine's configuration, whose parts have vLLM's names, too."""
        return self.config

    @property
    def model_config(self) -> ModelConfig:
        """The configuration of the model."""
        return self.config.model

    @property
    def tokenizer(self) -> HfTokenizer:
        """The engine's tokenizer, with Hugging Face's calls. `get_tokenizer()` has raycore's own."""
        return HfTokenizer.of(self._client.tokenizer)

    async def get_model_config(self) -> ModelConfig:
        """The configuration of the model."""
        return self.config.model

    async def do_log_stats(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Log the throughput of each rank that had work since the previous call, at level INFO."""
        super().do_log_stats()

    async def is_tracing_enabled(self) -> bool:
        """Whether the engine sends traces: see the option `otlp_traces_endpoint`."""
        return self.traces.is_on

    async def abort_requests(self, request_ids: Sequence[str] | None = None) -> int:
        """Abort requests as `abort()` does, also those of other API servers, and return how many there were.

        None: all of them. An id also stands for the requests whose ids are that id and a number, as `ID-3`: a server's
        prompts.
        """
        return await on_own_thread(self.clients.abort_requests, request_ids)

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float = 300) -> None:
        """The same as `scale(new_data_parallel_size, drain_timeout)`, under vLLM's name."""
        await self.scale(new_data_parallel_size, drain_timeout)

    async def _call(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return await on_own_thread(call, EngineCalls(self._parts), *args, **kwargs)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.shutdown)


AsyncLLMEngine = AsyncLLM
"""vLLM's older name."""
