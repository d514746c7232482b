"""Prompts that come piece by piece, with a client that the tests play."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from raycore.client.inputs import OnlyText, ParsedPrompt, as_prompt_list, parse_prompts
from raycore.client.streamed_prompts import generate_streamed
from raycore.client.streams import Streams
from raycore.client.updates import Update
from raycore.errors import InvalidRequest
from raycore.inputs import StreamingInput
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.sampling_params import RequestOutputKind, SamplingParams

DELTA = SamplingParams(max_tokens=3, output_kind=RequestOutputKind.DELTA)
PLAIN = SamplingParams(max_tokens=3)


class Client:
    """Answers each request at once, with as many tokens as it asks for: 100, 101 and so on, one output for each."""

    stream_interval = 1
    images: Any = OnlyText()

    def __init__(self, tokenizer=None) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[ParsedPrompt] = []
        self.params: list[SamplingParams] = []
        self.ids: list[str] = []
        self.aborted: list[str] = []
        self.reason = "length"

    def submit(self, prompts, params, sink, **options):
        (prompt,), (asked,), (request_id,) = prompts, params, options["request_ids"]
        self.prompts.append(prompt)
        self.params.append(asked)
        self.ids.append(request_id)
        ids = [100 + index for index in range(asked.max_tokens)]
        completion = CompletionOutput(0, "x" * len(ids), ids, finish_reason=self.reason)
        sink([Update(request_id, RequestOutput(request_id, None, prompt.token_ids, None, [completion], True))])
        return [request_id]

    def knows_structured_outputs(self, params):
        return True

    def abort(self, request_ids, notify=False):
        self.aborted += request_ids


async def given(*pieces):
    for piece in pieces:
        yield piece


def tokens(*ids, params=None):
    return StreamingInput({"prompt_token_ids": list(ids)}, params)


async def taken(client, pieces, params=PLAIN, **options):
    return [each async for each in generate_streamed(Streams(client), pieces, params, "a", **options)]


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
        async for output in generate_streamed(Streams(client), pieces(), params, "a"):
            outputs.append(output)
            if len(outputs) == 1:
                queue.put_nowait(tokens(2))
            elif len(outputs) == 2:
                queue.put_nowait(None)
        return outputs

    client = Client()
    outputs = asyncio.run(run())
    assert [each.finished for each in outputs] == [False, False, True]
    made = [each.outputs[0].token_ids for each in outputs]
    assert made == [[100, 101, 102], [100, 101, 102], [] if params is DELTA else [100, 101, 102]]
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


def test_leaving_early_ends_the_callers_stream():
    async def run():
        async def pieces():
            try:
                yield tokens(1)
                await asyncio.Event().wait()
            finally:
                ended.append(True)

        async with aclosing(generate_streamed(Streams(Client()), pieces(), PLAIN)) as outputs:
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
        outputs = generate_streamed(Streams(Client()), pieces(), PLAIN)
        assert (await anext(outputs)).outputs[0].token_ids == [100, 101, 102]
        with pytest.raises(ValueError, match="mine"):
            await anext(outputs)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("pieces", "params", "options", "message"),
    [
        ((), PLAIN, {}, "the prompt came as a stream that had no StreamingInput"),
        (([1, 2],), PLAIN, {}, r"a stream that had \[1, 2\]: give StreamingInput\(prompt\)"),
        ((tokens(1),), SamplingParams(n=2), {}, "n=2: a prompt that comes as a stream has one output"),
        ((tokens(1, params=SamplingParams(n=2)),), PLAIN, {}, "n=2"),
        ((tokens(1),), PLAIN, {"tokenization_kwargs": {"add_special_tokens": False}}, "tokenization_kwargs: a prompt"),
    ],
)
def test_what_cant_be_continued_is_refused_by_name(pieces, params, options, message):
    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(taken(Client(), given(*pieces), params, **options))


def test_other_calls_say_which_one_takes_streams():
    for call in (lambda: parse_prompts([given()], None), lambda: as_prompt_list(given())):
        with pytest.raises(InvalidRequest, match=r"streams of StreamingInput are for AsyncLLM\.generate\(\)"):
            call()
