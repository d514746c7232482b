"""Prompts that come as a stream: each piece makes the prompt longer, and the prompt so far is continued.

A piece is a request of its own, whose prompt has all pieces before it, with what was generated after each of them but
its last token. The prefix cache has these.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

from raycore.checkpoint.json_fields import shortened
from raycore.client.inputs import ParsedPrompt, Prompt, checked_params
from raycore.client.streams import Streams
from raycore.client.tokenization import Tokenization
from raycore.errors import InvalidRequest
from raycore.inputs import StreamingInput
from raycore.outputs import RequestOutput
from raycore.sampling_params import RequestOutputKind, SamplingParams

_FIRST, _NEXT = Tokenization(), Tokenization(add_special_tokens=False)


async def generate_streamed(
    streams: Streams,
    pieces: AsyncIterator[StreamingInput],
    params: SamplingParams,
    request_id: str | None = None,
    *,
    tokenization_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncGenerator[RequestOutput, None]:
    """See `AsyncLLM.generate`. `options`: those of `Streams.generate`."""
    if tokenization_kwargs:
        raise InvalidRequest("tokenization_kwargs: a prompt that comes as a stream takes none: give token ids")
    request_id = uuid.uuid4().hex if request_id is None else request_id
    coming = _Pieces(pieces)
    prompt: ParsedPrompt | None = None
    last: RequestOutput | None = None
    made: list[int] = []
    asked = params
    try:
        while (piece := await coming.take()) is not None:
            asked = _checked(piece.sampling_params or params)
            prompt = await _longer(streams, prompt, made, piece.prompt)
            made = []
            coming.look()
            async with aclosing(streams.generate(prompt, asked, request_id, **options)) as outputs:
                async for output in outputs:
                    (completion,) = output.outputs
                    is_delta = asked.output_kind is RequestOutputKind.DELTA
                    made = [*(made if is_delta else ()), *completion.token_ids]
                    was_aborted = completion.finish_reason == "abort"
                    last = replace(output, finished=output.finished and (was_aborted or coming.have_ended))
                    yield last
                    if was_aborted:
                        return
        if last is None:
            raise InvalidRequest("the prompt came as a stream that had no StreamingInput")
        if not last.finished:  # it wasn't known that no piece follows
            yield _nothing_new(last) if asked.output_kind is RequestOutputKind.DELTA else replace(last, finished=True)
    finally:
        await coming.close()


async def _longer(streams: Streams, before: ParsedPrompt | None, made: list[int], piece: Prompt) -> ParsedPrompt:
    """The prompt with another piece, and with what was generated before it."""
    parsed = await streams.parsed(piece, _FIRST if before is None else _NEXT)
    if parsed.features or parsed.second_text:
        raise InvalidRequest("a StreamingInput has text or token ids, and no images, embeddings or pairs of texts")
    if before is None:
        return parsed
    if parsed.cache_salt not in (None, before.cache_salt):
        raise InvalidRequest(f"cache_salt={shortened(parsed.cache_salt)}: the first StreamingInput has another one")
    return ParsedPrompt(None, [*before.token_ids, *made[:-1], *parsed.token_ids], before.cache_salt)


def _checked(params: SamplingParams) -> SamplingParams:
    if checked_params(params).n != 1:
        raise InvalidRequest(f"n={params.n}: a prompt that comes as a stream has one output: n=1")
    return params


def _nothing_new(last: RequestOutput) -> RequestOutput:
    (completion,) = last.outputs
    logprobs = None if completion.logprobs is None else completion.logprobs[:0]
    empty = replace(completion, text="", token_ids=[], logprobs=logprobs)
    return replace(last, outputs=[empty], finished=True)


class _Pieces:
    """The pieces of one prompt. The next one is waited for while the prompt so far is continued."""

    def __init__(self, pieces: AsyncIterator[StreamingInput]) -> None:
        self._pieces = pieces
        self._next: asyncio.Future[Any] | None = None

    @property
    def have_ended(self) -> bool:
        """Whether it is known already that none follows."""
        found = self._next
        return found is not None and found.done() and found.exception() is None and found.result() is None

    def look(self) -> None:
        """Begin to wait for the next one."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._read())

    async def take(self) -> StreamingInput | None:
        """The next one; None if there is none. Raises what the caller's stream raises."""
        self.look()
        assert self._next is not None
        piece = await self._next
        self._next = None
        if piece is not None and not isinstance(piece, StreamingInput):
            raise InvalidRequest(
                f"the prompt came as a stream that had {shortened(piece)}: give StreamingInput(prompt)"
            )
        return piece

    async def close(self) -> None:
        """End the wait, and the caller's stream."""
        if self._next is not None:
            self._next.cancel()
            with suppress(asyncio.CancelledError, Exception):  # the caller's own, which no longer matters
                await self._next
        pieces: Any = self._pieces
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()

    async def _read(self) -> object:
        try:
            return await anext(self._pieces)
        except StopAsyncIteration:
            return None
