"""Prompts that come piece by piece, with a client that the tests play."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import Any

import pytest
from msgspec.structs import replace
from waiting import LONG_S

from raycore.client import streamed_prompts
from raycore.client.ask import Ask
from raycore.client.inputs import OnlyText, ParsedPrompt, as_prompt_list, parse_prompts
from raycore.client.reserved_ids import ReservedIds
from raycore.client.streamed_prompts import generate_streamed
from raycore.client.streams import Streams
from raycore.client.tokenization import Tokenization
from raycore.client.updates import Update
from raycore.client.watchers import Watchers
from raycore.errors import EngineDeadError, InvalidRequest
from raycore.inputs import StreamingInput
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import RequestOutputKind, SamplingParams

DELTA = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)
PLAIN = SamplingParams(max_tokens=3)
ONE = [Ask([1], PLAIN, "a", stream=True)]


class Client:
    """Answers each request at once, with as many tokens as it asks for: 100, 101 and so on. With DELTA, one by one."""

    stream_interval, max_model_len = 1, 100
    images: Any = OnlyText()

    def __init__(self, tokenizer=None) -> None:
        self.tokenizer = tokenizer
        self.watchers = Watchers()
        self.prompts: list[ParsedPrompt] = []
        self.params: list[SamplingParams] = []
        self.ids: list[str] = []
        self.aborted: list[str] = []
        self.reason = "length"
        self.reserved = ReservedIds()

    @property
    def checks(self):
        return self

    def submit(self, asks, sink):
        (ask,) = asks
        prompt, asked, request_id = ask.parsed, ask.params, ask.request_id
        self.prompts.append(prompt)
        self.params.append(asked)
        self.ids.append(request_id)
        ids = [100 + index for index in range(asked.max_tokens)]

        def give(num_tokens):
            reason = self.reason if num_tokens == len(ids) else None
            completion = CompletionOutput(0, "x" * num_tokens, ids[:num_tokens], finish_reason=reason)
            sink(
                [
                    Update(
                        request_id, RequestOutput(request_id, None, prompt.token_ids, None, [completion], bool(reason))
                    )
                ]
            )

        async def give_each():
            for num_tokens in range(1, len(ids) + 1):
                give(num_tokens)
                for _ in range(10):  # until it has been read
                    await asyncio.sleep(0)

        if asked.output_kind is RequestOutputKind.DELTA:
            self.giving = asyncio.ensure_future(give_each())
        else:
            give(len(ids))

    def knows_structured_outputs(self, params):
        return True

    def abort(self, request_ids, notify=False):
        self.aborted += request_ids


async def given(*pieces):
    for piece in pieces:
        yield piece


def tokens(*ids, params=None):
    return StreamingInput({"prompt_token_ids": list(ids)}, params)


def streamed(streams, pieces, params=PLAIN, **fields):
    return generate_streamed(streams, pieces, Ask("", params, "a", **{"stream": True, **fields}))


async def taken(client, pieces, params=PLAIN, **fields):
    return [each async for each in streamed(Streams(client), pieces, params, **fields)]


def test_each_piece_continues_the_prompt_so_far_and_what_was_made_of_it_but_the_last_token():
    client = Client()
    pieces = given(tokens(1, 2), tokens(3), tokens(4, params=SamplingParams(max_tokens=1)), tokens(5))
    outputs = asyncio.run(taken(client, pieces))
    assert [each.token_ids for each in client.prompts] == [
        [1, 2],
        [1, 2, 100, 101, 3],
        [1, 2, 100, 101, 3, 100, 101, 4],
        [1, 2, 100, 101, 3, 100, 101, 4, 5],
    ]
    assert [each.max_tokens for each in client.params] == [3, 3, 1, 3]
    assert client.ids == ["a"] * 4
    ends = [each.outputs[0].finish_reason for each in outputs]
    assert ends[:4] == ["length"] * 4


@pytest.mark.parametrize(
    "params", [PLAIN, DELTA, SamplingParams(max_tokens=3, output_kind=RequestOutputKind.FINAL_ONLY)]
)
def test_only_the_very_last_output_is_finished(params):
    async def run():
        queue = asyncio.Queue()

        async def pieces():
            while (piece := await queue.get()) is not None:
                yield piece

        queue.put_nowait(tokens(1))
        outputs = []
        async for output in streamed(Streams(client), pieces(), params):
            outputs.append(output)
            if output.outputs[0].finish_reason is not None:
                queue.put_nowait(following.pop(0) if following else None)
        return outputs

    client, following = Client(), [tokens(2)]
    outputs = asyncio.run(run())
    made = [each.outputs[0].token_ids for each in outputs]
    whole = [100, 101, 102]
    assert made == ([[100], [101], [102]] * 2 + [[]] if params is DELTA else [whole] * 3)
    assert [each.finished for each in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [each.token_ids for each in client.prompts] == [[1], [1, 100, 101, 2]]


def test_texts_after_the_first_get_no_special_tokens(tokenizer):
    client = Client(tokenizer)
    asyncio.run(taken(client, given(StreamingInput("ab"), StreamingInput("cd")), SamplingParams(max_tokens=1)))
    first = tokenizer.encode("ab")
    assert [each.token_ids for each in client.prompts] == [
        first,
        [*first, *tokenizer.encode("cd", add_special_tokens=False)],
    ]


def test_the_salt_of_the_first_piece_holds():
    client = Client()
    first = StreamingInput({"prompt_token_ids": [1], "cache_salt": "s"})
    asyncio.run(taken(client, given(first, tokens(2))))
    assert [each.cache_salt for each in client.prompts] == ["s", "s"]
    with pytest.raises(InvalidRequest, match="cache_salt='s': the first StreamingInput has another one"):
        asyncio.run(taken(client, given(tokens(2), first)))


def test_an_aborted_piece_ends_the_stream():
    client = Client()
    client.reason = "abort"
    outputs = asyncio.run(taken(client, given(tokens(1), tokens(2))))
    assert [each.finished for each in outputs] == [True]
    assert len(client.prompts) == 1


@pytest.mark.parametrize("first", [[], [tokens(1)]], ids=["before any piece", "between two"])
@pytest.mark.parametrize("params", [PLAIN, DELTA])
def test_an_abort_while_no_piece_is_there_ends_the_stream(params, first):
    async def run():
        async def pieces():
            for piece in first:
                yield piece
            try:
                waits.set()
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async def consume():
            return [each async for each in streamed(streams, pieces(), params)]

        waits, streams = asyncio.Event(), Streams(client)
        consuming = asyncio.ensure_future(consume())
        await waits.wait()
        for _ in range(100):  # until the first piece's outputs have been read
            await asyncio.sleep(0)
        assert list(client.reserved) == ["a"]
        client.reserved.abort(["b", "a"])
        return await asyncio.wait_for(consuming, LONG_S)

    client, ended = Client(), []
    *_, last = asyncio.run(run())
    assert (last.request_id, last.finished, last.outputs[0].finish_reason) == ("a", True, "abort")
    assert last.outputs[0].token_ids == ([100, 101, 102] if first and params is PLAIN else [])
    assert len(client.prompts) == len(first)
    assert ended == [True]
    assert not list(client.reserved)


@pytest.mark.parametrize("first", [[], [tokens(1)]], ids=["before any piece", "between two"])
def test_an_engine_that_fails_while_no_piece_is_there_ends_the_stream(first):
    async def run():
        async def consume():
            return [each async for each in streamed(Streams(client), waiting_after(*first), PLAIN)]

        consuming = asyncio.ensure_future(consume())
        for _ in range(100):  # until the first piece's outputs have been read
            await asyncio.sleep(0)
        assert not consuming.done()
        client.reserved.fail(EngineDeadError("the ranks have died"))
        await asyncio.wait_for(consuming, LONG_S)

    client = Client()
    with pytest.raises(EngineDeadError, match="the ranks have died"):
        asyncio.run(run())
    assert not list(client.reserved)


@pytest.mark.parametrize(
    "end",
    [
        lambda client: client.reserved.abort(["a"]),
        lambda client: client.reserved.fail(EngineDeadError("the ranks have died")),
    ],
    ids=["abort", "failure"],
)
def test_nothing_comes_after_the_finished_output(end):
    async def run():
        outputs = []
        async for output in streamed(Streams(client), given(tokens(1)), DELTA):
            outputs.append(output)
            if output.finished:
                end(client)
                for _ in range(10):  # until the call could have heard of it
                    await asyncio.sleep(0)
        return outputs

    client = Client()
    outputs = asyncio.run(run())
    assert [each.finished for each in outputs] == [False, False, True]


def test_an_id_is_in_use_between_pieces():
    async def run():
        streams = Streams(Client())
        async with aclosing(streamed(streams, waiting_after(tokens(1)), PLAIN)) as outputs:
            await anext(outputs)
            for other in (streams.ask(ONE), streamed(streams, given(tokens(1)), PLAIN)):
                with pytest.raises(InvalidRequest, match="request_id='a' is already in use"):
                    await anext(other)
            with pytest.raises(InvalidRequest, match="request_id='a' is already in use"):
                await anext(streams.ask([replace(ONE[0], params=PoolingParams())]))
        assert (await anext(streams.ask(ONE))).finished

    asyncio.run(run())


async def waiting_after(*pieces):
    for piece in pieces:
        yield piece
    await asyncio.Event().wait()


def test_a_consumer_that_is_cancelled_while_it_closes_is_cancelled():
    async def run():
        async def pieces():
            yield tokens(1)
            try:
                await asyncio.Event().wait()
            finally:
                closes.set()
                await may_end.wait()

        async def consume():
            async with aclosing(streamed(Streams(Client()), pieces(), PLAIN)) as outputs:
                await anext(outputs)
                await asyncio.sleep(0)  # the wait for the next piece has begun

        closes, may_end = asyncio.Event(), asyncio.Event()
        consuming = asyncio.ensure_future(consume())
        await closes.wait()
        consuming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await consuming
        may_end.set()

    asyncio.run(run())


def test_a_stream_that_doesnt_end_when_it_is_cancelled_is_left(monkeypatch, caplog):
    async def run():
        async def pieces():
            yield tokens(1)
            while not may_end.is_set():
                with suppress(asyncio.CancelledError):
                    await may_end.wait()

        may_end = asyncio.Event()
        async with aclosing(streamed(Streams(Client()), pieces(), PLAIN)) as outputs:
            await anext(outputs)
            await asyncio.sleep(0)
        may_end.set()

    monkeypatch.setattr(streamed_prompts, "_CLOSE_S", 0.0)
    asyncio.run(run())
    assert "goes on 0 s after it was cancelled" in caplog.text


def test_leaving_early_ends_the_callers_stream():
    async def run():
        async def pieces():
            try:
                yield tokens(1)
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async with aclosing(streamed(Streams(Client()), pieces(), PLAIN)) as outputs:
            async for output in outputs:
                assert not output.finished
                break

    ended = []
    asyncio.run(run())
    assert ended == [True]


def test_an_error_of_the_callers_stream_is_raised_after_the_outputs_of_the_pieces_before():
    async def pieces():
        yield tokens(1)
        raise ValueError("mine")

    async def run():
        outputs = streamed(Streams(Client()), pieces(), PLAIN)
        assert (await anext(outputs)).outputs[0].token_ids == [100, 101, 102]
        with pytest.raises(ValueError, match="mine"):
            await anext(outputs)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("pieces", "params", "options", "message"),
    [
        ((), PLAIN, {}, "the prompt came as a stream that had no StreamingInput"),
        ((tokens(1), None, tokens(2)), PLAIN, {}, r"a stream that had None: give StreamingInput\(prompt\)"),
        (([1, 2],), PLAIN, {}, r"a stream that had \[1, 2\]: give StreamingInput\(prompt\)"),
        ((tokens(1),), SamplingParams(n=2), {}, "n=2: a prompt that comes as a stream has one output"),
        ((tokens(1, params=SamplingParams(n=2)),), PLAIN, {}, "n=2"),
        (
            (tokens(1),),
            PLAIN,
            {"tokenization": Tokenization(add_special_tokens=False)},
            "tokenization_kwargs: a prompt",
        ),
    ],
)
def test_what_cant_be_continued_is_refused_by_name(pieces, params, options, message):
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(taken(Client(), given(*pieces), params, **options))


def test_other_calls_say_which_one_takes_streams():
    for call in (lambda: parse_prompts([given()], None), lambda: as_prompt_list(given())):
        with pytest.raises(InvalidRequest, match=r"streams of StreamingInput are for AsyncLLM\.generate\(\)"):
            call()
