"""Requests as async iterators, on the callers' event loops. Does not depend on Ray.

A batch from a rank wakes each event loop once, regardless of the number of streams on that loop. A stream holds only
the newest update that hasn't been read. Updates have the whole output so far, so a slow reader misses no text and costs
no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from raycore.client.inputs import (
    Images,
    ParsedPrompt,
    Prompt,
    checked_request_id,
    has_images,
    parse_prompts,
    with_adapters,
)
from raycore.client.output_kinds import OutputKinds
from raycore.client.pooling import PLACEHOLDER
from raycore.client.request_state import PooledOutput
from raycore.client.reserved_ids import ReservedIds
from raycore.client.tokenization import Tokenization
from raycore.client.updates import Sink, Streaming, Update, coalescing_s
from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.node.threads import on_own_thread
from raycore.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import RequestOutputKind, SamplingParams
from raycore.short_tracebacks import ends_traceback
from raycore.system import asyncio, threading, uuid
from raycore.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from raycore.beam_search import BeamSearchParams
    from raycore.client.beams import BeamSearch

_PLAIN = Tokenization()

_OutputT = TypeVar("_OutputT")
_ResultT = TypeVar("_ResultT")


class Submitter(Protocol):
    """The part of a client's interface that `Streams` uses."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def images(self) -> Images: ...

    @property
    def reserved(self) -> ReservedIds: ...

    def submit(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Sequence[SamplingParams],
        sink: Sink,
        *,
        stream: Streaming = False,
        flush_interval_s: float = 0.0,
        request_ids: Sequence[str] | None = None,
        priorities: Sequence[int] | None = None,
        data_parallel_rank: int | None = None,
        pooling: Sequence[PoolingParams] | None = None,
    ) -> list[str]: ...

    def beam_search(self, prompt: ParsedPrompt, params: BeamSearchParams) -> BeamSearch: ...

    def resolved_pooling(self, params: PoolingParams | None, task: str | None = None) -> PoolingParams: ...

    @property
    def max_model_len(self) -> int: ...

    def check_structured_outputs(self, params: SamplingParams) -> None: ...

    def knows_structured_outputs(self, params: SamplingParams) -> bool: ...

    def knows_adapter(self, adapter: LoRARequest) -> bool: ...

    def check_adapter(self, adapter: LoRARequest) -> None: ...

    def abort(self, request_ids: Sequence[str], notify: bool = False) -> None: ...

    @property
    def stream_interval(self) -> int: ...


class Streams:
    """The streams of one client, on any number of event loops. Thread-safe."""

    def __init__(self, client: Submitter) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopStreams] = weakref.WeakKeyDictionary()

    async def generate(
        self,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        *,
        stream: Streaming = True,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        is_reserved: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """See `AsyncLLM.generate`. `is_reserved`: the caller has the id by `reserved()`."""
        added = await self.add(
            prompt,
            params,
            request_id,
            priority,
            stream=stream,
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
            tokenization_kwargs=tokenization_kwargs,
            is_reserved=is_reserved,
        )
        try:
            while not added.is_finished:
                output = added.get_nowait()
                if output is None:
                    await added.arrival()
                else:
                    yield output
        finally:
            added.close()

    @contextmanager
    def reserved(self, request_id: str) -> Generator[asyncio.Future[BaseException | None], None, None]:
        """Keep an id for one call, whose requests have it one after the other.

        Yields what an abort completes with None, and the engine's failure with itself.

        Raises:
            InvalidRequest: the id is already in use.
        """
        self._check_unused([request_id])
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[BaseException | None] = loop.create_future()

        def complete(failure: BaseException | None) -> None:
            if not ended.done():
                ended.set_result(failure)

        def on_end(failure: BaseException | None) -> None:
            with suppress(RuntimeError):  # the loop is closed, and the call with it
                loop.call_soon_threadsafe(complete, failure)

        with self._client.reserved.reserve(request_id, on_end):
            yield ended

    @ends_traceback
    async def add(
        self,
        prompt: Prompt | ParsedPrompt,
        params: SamplingParams | PoolingParams,
        request_id: str | None = None,
        priority: int = 0,
        *,
        stream: Streaming = True,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        is_reserved: bool = False,
    ) -> RequestStream[Any]:
        """See `AsyncLLM.add_request`, and `generate`."""
        streams = self._of_this_loop()
        pooling = self._client.resolved_pooling(params) if isinstance(params, PoolingParams) else None
        asked = PLACEHOLDER if isinstance(params, PoolingParams) else params
        kinds = OutputKinds.of(asked, self._client.stream_interval) if pooling is None else None
        if stream not in (True, False, "text"):
            raise InvalidRequest(f"stream={stream!r} isn't True, False or 'text'")
        if pooling is not None or asked.output_kind is RequestOutputKind.FINAL_ONLY:
            stream = False
        elif kinds is not None:
            stream = bool(stream)  # it counts tokens, or holds back text that the next token may be enough for
        request_id = uuid.uuid4().hex if request_id is None else checked_request_id(request_id)
        if not self._client.knows_structured_outputs(asked):
            # so that the event loop isn't blocked; submit() then finds that the constraint has been checked
            await on_own_thread(self._client.check_structured_outputs, asked)
        how = _PLAIN
        if tokenization_kwargs:
            how = Tokenization.of(None, tokenization_kwargs, self._client.max_model_len)
        prompts = with_adapters([await self.parsed(prompt, how)], lora_request)
        await self._check_adapter(lora_request)
        if not is_reserved:
            self._check_unused([request_id])
        self._client.submit(
            prompts,
            [asked],
            streams.put,
            stream=stream,
            flush_interval_s=0.0 if stream else coalescing_s([asked]),
            request_ids=[request_id],
            priorities=[priority],
            data_parallel_rank=data_parallel_rank,
            pooling=None if pooling is None else [pooling],
        )
        own = streams.open(request_id)

        def close() -> None:
            streams.close(request_id)
            if not added.is_finished:
                self._client.abort([request_id])

        added: RequestStream[Any] = RequestStream(request_id, own, kinds, close)
        return added

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
        """See `AsyncLLM.beam_search`."""
        request_id = uuid.uuid4().hex if request_id is None else checked_request_id(request_id)
        (parsed,) = with_adapters([await self.parsed(prompt)], lora_request)
        await self._check_adapter(lora_request)
        search = self._client.beam_search(parsed, params)
        step = 0
        while prompts := search.prompts:
            outputs = await self._ends(
                prompts,
                [search.step_params] * len(prompts),
                [f"{request_id}-{step}-{index}" for index in range(len(prompts))],
                priority,
                data_parallel_rank,
                lambda output: cast("RequestOutput", output),
            )
            search.take(outputs)
            step += 1
        return search.output(request_id, self._client.tokenizer)

    async def encode(
        self,
        prompt: Prompt | ParsedPrompt,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """See `AsyncLLM.encode`."""
        (result,) = await self.encode_all(
            [prompt],
            params,
            None if request_id is None else [request_id],
            priority,
            pooling_task=pooling_task,
            truncate_prompt_tokens=truncate_prompt_tokens,
            tokenization_kwargs=tokenization_kwargs,
            data_parallel_rank=data_parallel_rank,
            lora_request=lora_request,
        )
        yield result

    async def encode_all(
        self,
        prompts: Sequence[Prompt | ParsedPrompt],
        params: PoolingParams | None = None,
        request_ids: Sequence[str] | None = None,
        priority: int = 0,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """See `AsyncLLM.encode_all`."""
        given = [uuid.uuid4().hex for _ in prompts] if request_ids is None else request_ids
        ids = [checked_request_id(request_id) for request_id in given]
        pooling = self._client.resolved_pooling(params, pooling_task)
        how = Tokenization.of(truncate_prompt_tokens, tokenization_kwargs, self._client.max_model_len)
        prompts = [
            await self.parsed(prompt, how) if not isinstance(prompt, ParsedPrompt) and has_images(prompt) else prompt
            for prompt in prompts
        ]
        own = [prompt for prompt in prompts if not isinstance(prompt, ParsedPrompt)]
        from_own = iter(parse_prompts(own, self._client.tokenizer, how, self._client.images))
        parsed = [prompt if isinstance(prompt, ParsedPrompt) else next(from_own) for prompt in prompts]
        if len(set(ids)) != len(parsed):
            raise InvalidRequest(f"{len(set(ids))} different request_ids for {len(parsed)} prompts: give one for each")
        with_adapters(parsed, lora_request)
        await self._check_adapter(lora_request)
        if not parsed:
            return []
        return await self._ends(
            parsed,
            [PLACEHOLDER] * len(parsed),
            ids,
            priority,
            data_parallel_rank,
            lambda output: cast("PooledOutput", output).result(),
            pooling=[pooling] * len(parsed),
        )

    async def _ends(
        self,
        prompts: Sequence[ParsedPrompt],
        params: Sequence[SamplingParams],
        ids: Sequence[str],
        priority: int,
        data_parallel_rank: int | None,
        result: Callable[[object], _ResultT],
        pooling: Sequence[PoolingParams] | None = None,
    ) -> list[_ResultT]:
        """Submit requests together, and return the result of each one's last output. If one fails, all are aborted.

        `result`: may raise, which aborts all, too.
        """
        streams = self._of_this_loop()
        self._check_unused(ids)
        self._client.submit(
            prompts,
            params,
            streams.put,
            request_ids=ids,
            priorities=[priority] * len(prompts),
            data_parallel_rank=data_parallel_rank,
            pooling=pooling,
        )
        opened = [streams.open(request_id) for request_id in ids]
        results: list[_ResultT] = []
        try:
            for stream in opened:
                update = await stream.next()
                if update.error is not None:
                    raise update.error.with_traceback(None)  # other callers may get the same object
                results.append(result(update.output))
        finally:
            for request_id in ids:
                streams.close(request_id)
            if len(results) < len(ids):
                self._client.abort(ids)
        return results

    async def parsed(self, prompt: Prompt | ParsedPrompt, how: Tokenization = _PLAIN) -> ParsedPrompt:
        """Check a prompt. Its images, if it has any, are fetched and processed on other threads."""
        if isinstance(prompt, ParsedPrompt):
            return prompt
        images = self._client.images
        parse = partial(parse_prompts, [prompt], self._client.tokenizer, how, images)
        if not has_images(prompt) or images.executor is None:
            (parsed,) = parse()
        else:
            (parsed,) = await asyncio.get_running_loop().run_in_executor(images.executor, parse)
        return parsed

    async def _check_adapter(self, adapter: LoRARequest | None) -> None:
        if adapter is not None and not self._client.knows_adapter(adapter):
            # a slow disk must not block the event loop; submit() then finds that the adapter has been checked
            await on_own_thread(self._client.check_adapter, adapter)

    def _check_unused(self, ids: Sequence[str]) -> None:
        streams, reserved = self._of_this_loop(), self._client.reserved
        used = next((each for each in ids if each in streams or each in reserved), None)
        if used is not None:
            raise InvalidRequest(f"request_id={used!r} is already in use")

    def _of_this_loop(self) -> _LoopStreams:
        loop = asyncio.get_running_loop()
        with self._lock:
            streams = self._loops.get(loop)
            if streams is None:
                streams = self._loops[loop] = _LoopStreams(loop)
            return streams


class RequestStream(Generic[_OutputT]):
    """The outputs of one request, for a coroutine that takes them one after the other."""

    def __init__(self, request_id: str, stream: _Stream, kinds: OutputKinds | None, close: Callable[[], None]) -> None:
        self.request_id = request_id
        self.is_finished = False
        """Whether the last output was taken, or the request's error was raised."""
        self._stream = stream
        self._kinds = kinds
        self._close = close
        self._is_open = True

    async def get(self) -> _OutputT:
        """Wait for the next output. A slow caller doesn't get every output, but misses nothing of their contents.

        Raises:
            RequestFailed: the request failed, but the engine didn't.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
            InvalidRequest: the last output was taken before.
        """
        while (output := self.get_nowait()) is None:
            await self.arrival()
        return output

    def arrival(self) -> asyncio.Future[None]:
        """Await this after `get_nowait()` has returned None, and then ask again.

        For loops that take every token: a coroutine such as `get()` costs more than the rest of such a loop.
        """
        return self._stream.arrival()

    def get_nowait(self) -> _OutputT | None:
        """The next output if it has come already, else None. The errors are those of `get()`."""
        self._check_unfinished()
        update = self._stream.take()
        return None if update is None else self._taken(update)

    def close(self) -> None:
        """Abort the request if it hasn't finished. Idempotent. Needed if the last output isn't taken."""
        if self._is_open:
            self._is_open = False
            self._close()

    def _check_unfinished(self) -> None:
        if self.is_finished or not self._is_open:
            raise InvalidRequest(f"request {self.request_id} has no more outputs: it has finished, or was closed")

    def _taken(self, update: Update) -> _OutputT | None:
        self.is_finished = update.is_last
        if self.is_finished:
            self.close()
        if update.error is not None:
            raise update.error.with_traceback(None)  # other callers may get the same object
        whole: Any = update.output
        if isinstance(whole, PooledOutput):
            return cast("_OutputT", whole.result())
        return whole if self._kinds is None else cast("_OutputT | None", self._kinds.take(whole))


class _LoopStreams:
    """The streams on one event loop. Only `put` may be called from other threads."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        # weak, because `Streams._loops` has the loop as a weak key for this object, which must not keep the loop alive
        self._loop = weakref.ref(loop)
        self._streams: dict[str, _Stream] = {}

    def put(self, updates: list[Update]) -> None:
        """Pass updates to the event loop. Called from the client's threads."""
        loop = self._loop()
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed, and its streams with it
                loop.call_soon_threadsafe(self._distribute, updates)

    def __contains__(self, request_id: str) -> bool:
        """Whether the request has an open stream."""
        return request_id in self._streams

    def open(self, request_id: str) -> _Stream:
        """Open the stream of a submitted request.

        Call this before control returns to the event loop, which drops updates of streams that aren't open. So nothing
        may be awaited between `submit()` and this call.
        """
        stream = self._streams[request_id] = _Stream(self._loop)
        return stream

    def close(self, request_id: str) -> None:
        """Close the request's stream. Later updates are dropped."""
        del self._streams[request_id]

    def _distribute(self, updates: list[Update]) -> None:
        for update in updates:
            stream = self._streams.get(update.request_id)
            if stream is not None:
                stream.put(update)


class _Stream:
    """Holds one request's newest update until it is read."""

    __slots__ = ("_loop", "_update", "_waiter")

    def __init__(self, loop: weakref.ref[asyncio.AbstractEventLoop]) -> None:
        self._loop = loop
        self._update: Update | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: Update) -> None:
        """Replace the unread update. Ignores an output that comes after the last update: see `Sink`."""
        if self._update is not None and self._update.is_last:
            return
        self._update = update
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def next(self) -> Update:
        """The newest unread update. Waits until there is one."""
        while (update := self.take()) is None:
            await self.arrival()
        return update

    def arrival(self) -> asyncio.Future[None]:
        """A future that is done when there is an update. Call this on the event loop, while there is none."""
        loop = self._loop()
        assert loop is not None, "it runs"
        self._waiter = loop.create_future()
        return self._waiter

    def take(self) -> Update | None:
        """The newest unread update, if there is one."""
        update, self._update = self._update, None
        return update
