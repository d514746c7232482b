"""Requests as async iterators, on the callers' event loops. Does not depend on Ray.

A batch from a rank wakes each event loop once, regardless of the number of streams on that loop. A stream holds only
the newest update that hasn't been read. Updates have the whole output so far, so a slow reader misses no text and costs
no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import msgspec

from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.inputs import (
    ParsedPrompt,
    Prompt,
    checked_adapter,
    checked_request_id,
    has_images,
    parse_prompts,
)
from raycore.client.output_kinds import OutputKinds
from raycore.client.request_state import PooledOutput
from raycore.client.tokenization import PLAIN, Tokenization
from raycore.client.updates import Update
from raycore.client.watchers import UNWATCHED, Watch
from raycore.errors import InvalidRequest
from raycore.node.threads import on_own_thread
from raycore.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import RequestOutputKind, SamplingParams
from raycore.short_tracebacks import ends_traceback
from raycore.system import asyncio, threading

if TYPE_CHECKING:
    from raycore.client.client import EngineClient  # imports Ray

_OutputT = TypeVar("_OutputT")


class Streams:
    """The streams of one client, on any number of event loops. Thread-safe."""

    def __init__(self, client: EngineClient) -> None:
        self.watchers = client.watchers
        self._client = client
        self._lock = threading.Lock()
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopStreams] = weakref.WeakKeyDictionary()

    async def ask(self, asks: Sequence[Ask]) -> AsyncGenerator[Any, None]:
        """Run requests. Yields their outputs. Leaving the iteration early aborts them.

        A request that generates yields `RequestOutput`s, as its parameters and its `stream` say, and a beam search one,
        whose sequences are the best ones. Requests that pool are submitted together. Each yields a
        `PoolingRequestOutput`, in their order. If one fails, all are aborted. They have the same `tokenization`.

        Raises:
            InvalidRequest: a request is unusable; the message says why.
            RequestFailed: a request failed, but the engine didn't.
            EngineDeadError: the engine has failed, was shut down or is draining; the message begins with the cause.
        """
        first = asks[0]
        if isinstance(first.params, BeamSearchParams):
            yield await self._search(first)
        elif isinstance(first.params, PoolingParams):
            for result in await self._pool(asks):
                yield result
        else:
            added = await self.add(first)
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
    async def add(self, ask: Ask) -> RequestStream[Any]:
        """Submit a request that generates or pools. The stream has its outputs. Its errors are those of `ask`."""
        streams = self._of_this_loop()
        ask = self.watchers.wanted(ask)
        if ask.stream not in (True, False, "text"):
            raise InvalidRequest(f"stream={ask.stream!r} isn't True, False or 'text'")
        kinds, stream = None, False
        if isinstance(ask.params, SamplingParams):
            kinds = OutputKinds.of(ask.params, self._client.stream_interval)
            if ask.params.output_kind is not RequestOutputKind.FINAL_ONLY:
                # `kinds` counts tokens, or holds back text that the next token may be enough for
                stream = ask.stream if kinds is None else bool(ask.stream)
        (ask,) = await self._parsed([msgspec.structs.replace(ask, stream=stream)])
        request_id = ask.request_id
        watch = self.watchers.watch([ask])
        try:
            await self._check_slowly([ask])
            if not ask.is_reserved:
                self._check_unused([request_id])
            self._client.submit([ask], streams.put)
        except BaseException as error:
            watch.end(error)
            raise
        own = streams.open(request_id)

        def close() -> None:
            streams.close(request_id)
            watch.end()
            if not added.is_finished:
                self._client.abort([request_id])

        if watch is UNWATCHED:
            added = RequestStream[Any](request_id, own, kinds, close)
        else:
            added = _WatchedStream[Any](request_id, own, kinds, close, watch)
        return added

    async def _search(self, ask: Ask) -> RequestOutput:
        """The result of a beam search."""
        (ask,) = await self._parsed([ask])
        with self.watchers.watch([ask]) as watch:
            await self._check_slowly([ask])
            search = self._client.checks.beam_search(ask)
            while asks := search.asks:
                search.take(await self._last_outputs(asks))
            output = search.output(self._client.tokenizer)
            watch.note(output)
        return output

    async def _pool(self, asks: Sequence[Ask]) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The results of requests that pool."""
        asks = await self._parsed(asks)
        with self.watchers.watch(asks) as watch:
            await self._check_slowly(asks)
            results: list[PoolingRequestOutput[PoolingOutput]] = []
            for output in await self._last_outputs(asks):
                watch.note(output)
                results.append(cast("PooledOutput", output).result())
        return results

    async def _last_outputs(self, asks: Sequence[Ask]) -> list[RequestOutput]:
        """Submit requests together, and return each one's last output. If one fails, all are aborted."""
        streams, ids = self._of_this_loop(), [ask.request_id for ask in asks]
        self._check_unused(ids)
        self._client.submit(asks, streams.put)
        opened = [streams.open(request_id) for request_id in ids]
        outputs: list[RequestOutput] = []
        try:
            for stream in opened:
                update = await stream.next()
                if update.error is not None:
                    raise update.error.with_traceback(None)  # other callers may get the same object
                assert update.output is not None
                if isinstance(update.output, PooledOutput):
                    update.output.result()  # raises if it was aborted
                outputs.append(update.output)
        finally:
            for request_id in ids:
                streams.close(request_id)
            if len(outputs) < len(ids):
                self._client.abort(ids)
        return outputs

    async def parsed(self, prompt: Prompt | ParsedPrompt, how: Tokenization = PLAIN) -> ParsedPrompt:
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

    async def _parsed(self, asks: Sequence[Ask]) -> list[Ask]:
        """Requests with parsed prompts and checked ids. Prompts without images are tokenized together."""
        ids, how = [checked_request_id(ask.request_id) for ask in asks], asks[0].tokenization
        prompts: list[Any] = [
            await self.parsed(ask.prompt, how) if has_images(ask.prompt) else ask.prompt for ask in asks
        ]
        own = [prompt for prompt in prompts if not isinstance(prompt, ParsedPrompt)]
        from_own = iter(parse_prompts(own, self._client.tokenizer, how, self._client.images) if own else ())
        return [
            msgspec.structs.replace(
                ask,
                prompt=prompt if isinstance(prompt, ParsedPrompt) else next(from_own),
                request_id=request_id,
                lora=checked_adapter(ask.lora),
            )
            for ask, prompt, request_id in zip(asks, prompts, ids, strict=True)
        ]

    async def _check_slowly(self, asks: Sequence[Ask]) -> None:
        """Check what may take seconds on other threads. `submit()` then finds that it has been checked."""
        checks = self._client.checks
        for ask in asks:
            if isinstance(ask.params, SamplingParams) and not checks.knows_structured_outputs(ask.params):
                await on_own_thread(checks.check_structured_outputs, ask.params)
            if ask.lora is not None and ask.lora not in checks.adapters:
                await on_own_thread(checks.adapters.check, ask.lora)  # the disk may be slow

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

    def __init__(
        self,
        request_id: str,
        stream: _Stream,
        kinds: OutputKinds | None,
        close: Callable[[], None],
        watch: Watch = UNWATCHED,
    ) -> None:
        self.request_id = request_id
        self.is_finished = False
        """Whether the last output was taken, or the request's error was raised."""
        self._stream = stream
        self._kinds = kinds
        self._close = close
        self._watch = watch
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


class _WatchedStream(RequestStream[_OutputT]):
    """The outputs of a request that is watched."""

    def _taken(self, update: Update) -> _OutputT | None:
        if update.output is not None:
            self._watch.note(update.output)
        else:
            self._watch.end(update.error)
        return super()._taken(update)


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
