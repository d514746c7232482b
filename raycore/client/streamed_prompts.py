"""Prompts that come as a stream: each piece makes the prompt longer, and the prompt so far is continued.

A piece is a request of its own, whose prompt has all pieces before it, with what was generated after each of them but
its last token. The prefix cache has these.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from enum import Enum, auto
from typing import Any

import msgspec

from raycore.client.ask import Ask
from raycore.client.inputs import ParsedPrompt, Prompt, checked_params, checked_request_id
from raycore.client.streams import Streams
from raycore.client.tokenization import PLAIN, Tokenization
from raycore.errors import InvalidRequest
from raycore.inputs import StreamingInput
from raycore.json_fields import shortened
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.sampling_params import RequestOutputKind, SamplingParams
from raycore.system import asyncio

logger = logging.getLogger(__name__)

_CLOSE_S = 10.0
"""How long the caller's stream may take to end once it is cancelled."""
_NEXT = Tokenization(add_special_tokens=False)


async def generate_streamed(
    streams: Streams, pieces: AsyncIterator[StreamingInput], ask: Ask
) -> AsyncGenerator[RequestOutput, None]:
    """See `AsyncLLM.generate`. `ask`: what is asked, without a prompt."""
    if ask.tokenization != PLAIN:
        raise InvalidRequest("tokenization_kwargs: a prompt that comes as a stream takes none: give token ids")
    request_id = checked_request_id(ask.request_id)
    params = checked_params(ask.params)
    coming = _Pieces(pieces)
    prompt: ParsedPrompt | None = None
    last: RequestOutput | None = None
    made: list[int] = []
    asked = params
    with streams.reserved(request_id) as ended:
        try:
            while isinstance(piece := await coming.take(ended), StreamingInput):
                asked = _checked(piece.sampling_params or params)
                prompt = await _longer(streams, prompt, made, piece.prompt)
                made = []
                coming.look()
                one = msgspec.structs.replace(ask, prompt=prompt, params=asked, is_reserved=True)
                outputs: AsyncGenerator[RequestOutput, None] = streams.ask([one])
                async with aclosing(outputs):
                    async for output in outputs:
                        (completion,) = output.outputs
                        if asked.output_kind is not RequestOutputKind.DELTA:
                            made.clear()
                        made += completion.token_ids
                        was_aborted = completion.finish_reason == "abort"
                        last = replace(output, finished=output.finished and (was_aborted or coming.have_ended))
                        yield last
                        if last.finished:  # an abort or a failure that comes only now is no longer heard of
                            return
            if piece is _End.ABORTED:
                yield _aborted(last or RequestOutput(request_id, None, [], None, [CompletionOutput(0, "", [])]), asked)
            elif last is None:
                raise InvalidRequest("the prompt came as a stream that had no StreamingInput")
            else:  # it wasn't known that no piece follows
                yield _again(last, asked)
        finally:
            await coming.close()


async def _longer(streams: Streams, before: ParsedPrompt | None, made: list[int], piece: Prompt) -> ParsedPrompt:
    """The prompt with another piece, and with what was generated before it."""
    parsed = await streams.parsed(piece, PLAIN if before is None else _NEXT)
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


def _again(last: RequestOutput, params: SamplingParams) -> RequestOutput:
    """The last output as one that is finished. It has nothing new."""
    if params.output_kind is not RequestOutputKind.DELTA:
        return replace(last, finished=True)
    (completion,) = last.outputs
    logprobs = None if completion.logprobs is None else completion.logprobs[:0]
    empty = replace(completion, text="", token_ids=[], logprobs=logprobs)
    return replace(last, outputs=[empty], finished=True)


def _aborted(last: RequestOutput, params: SamplingParams) -> RequestOutput:
    output = _again(last, params)
    (completion,) = output.outputs
    return replace(output, outputs=[replace(completion, finish_reason="abort", stop_reason=None)])


class _End(Enum):
    """Why no piece follows."""

    NO_MORE = auto()
    ABORTED = auto()


class _Pieces:
    """The pieces of one prompt. The next one is waited for while the prompt so far is continued."""

    def __init__(self, pieces: AsyncIterator[StreamingInput]) -> None:
        self._pieces = pieces
        self._next: asyncio.Future[object] | None = None

    @property
    def have_ended(self) -> bool:
        """Whether it is known already that none follows."""
        found = self._next
        return found is not None and found.done() and found.exception() is None and found.result() is _End.NO_MORE

    def look(self) -> None:
        """Begin to wait for the next one."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._read())

    async def take(self, ended: asyncio.Future[BaseException | None]) -> StreamingInput | _End:
        """The next one, or why there is none. Raises what the caller's stream raises.

        `ended`: ends the wait. Its result is raised, unless it is None.
        """
        self.look()
        assert self._next is not None
        await asyncio.wait([self._next, ended], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            failure = ended.result()
            if failure is not None:
                raise failure.with_traceback(None)  # otherwise it would collect the frames of all callers
            return _End.ABORTED
        piece = self._next.result()
        self._next = None
        if not isinstance(piece, StreamingInput | _End):
            raise InvalidRequest(
                f"the prompt came as a stream that had {shortened(piece)}: give StreamingInput(prompt)"
            )
        return piece

    async def close(self) -> None:
        """End the wait, and the caller's stream. What the stream raises no longer matters."""
        reading, self._next = self._next, None
        if reading is not None:
            reading.cancel()
            if not reading.done():
                await asyncio.wait([reading], timeout=_CLOSE_S)
            if not reading.done():
                logger.warning("a prompt's stream of StreamingInput goes on %g s after it was cancelled", _CLOSE_S)
                return
            if not reading.cancelled():
                reading.exception()  # or asyncio would log that nobody has asked
        pieces: Any = self._pieces
        if isinstance(pieces, AsyncGenerator):
            await pieces.aclose()

    async def _read(self) -> object:
        return await anext(self._pieces, _End.NO_MORE)
