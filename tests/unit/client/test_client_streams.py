"""Streams of a client on event loops, with a client that the tests play."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncGenerator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from waiting import LONG_S

from raycore.client.ask import Ask
from raycore.client.inputs import OnlyText
from raycore.client.request_state import PooledOutput
from raycore.client.reserved_ids import ReservedIds
from raycore.client.streams import Streams
from raycore.client.tokenization import Tokenization
from raycore.client.updates import Sink, Update
from raycore.client.watchers import Watchers
from raycore.errors import EngineDeadError, InvalidRequest, RequestFailed
from raycore.lora.request import LoRARequest
from raycore.outputs import CompletionOutput, RequestOutput
from raycore.pooling_params import PoolingParams
from raycore.sampling_params import RequestOutputKind, SamplingParams
from raycore.structured_outputs import StructuredOutputsParams

PARAMS = SamplingParams(max_tokens=4)
PROMPT = {"prompt_token_ids": [1, 2]}


class FakeClient:
    """Takes requests; the test says what comes of them."""

    stream_interval = 1

    tokenizer: Any = None
    images: Any = OnlyText()

    def __init__(self) -> None:
        self.reserved = ReservedIds()
        self.watchers = Watchers()
        self.sinks: dict[str, Sink] = {}
        self.aborted: list[str] = []
        self.is_streamed: bool | None = None

    @property
    def checks(self) -> Any:
        return self

    def submit(self, asks: Sequence[Ask], sink: Sink) -> None:
        (ask,) = asks
        self.sinks[ask.request_id] = sink
        self.is_streamed = ask.stream

    def knows_structured_outputs(self, params: SamplingParams) -> bool:
        return params.structured_outputs is None

    def abort(self, request_ids: Sequence[str], notify: bool = False) -> None:
        self.aborted += request_ids

    def give(self, *request_ids: str, num_tokens: int = 1, finished: bool = False) -> None:
        (sink,) = {self.sinks[request_id] for request_id in request_ids}
        sink([Update(request_id, output(request_id, num_tokens, finished)) for request_id in request_ids])


def outputs_of(streams: Streams, request_id: str, params: Any = PARAMS, **fields: Any) -> AsyncGenerator[Any, None]:
    return streams.ask([Ask(PROMPT, params, request_id, **{"stream": True, **fields})])


def output(request_id: str, num_tokens: int, finished: bool) -> RequestOutput:
    ids = list(range(num_tokens))
    return RequestOutput(request_id, None, [1, 2], None, [CompletionOutput(0, "", ids)], finished)


def num_tokens(output: RequestOutput) -> int:
    return len(output.outputs[0].token_ids)


def test_streams_of_one_event_loop_share_a_sink_and_get_their_own_updates():
    async def run() -> None:
        client = FakeClient()
        streams = Streams(client)
        first, second = (outputs_of(streams, name) for name in "ab")
        steps = [asyncio.ensure_future(anext(stream)) for stream in (first, second)]
        await asyncio.sleep(0)
        client.give("a", "b", num_tokens=1)
        assert [(each.request_id, num_tokens(each)) for each in await asyncio.gather(*steps)] == [("a", 1), ("b", 1)]
        client.give("b", num_tokens=2, finished=True)
        assert [num_tokens(each) async for each in second] == [2]
        client.give("a", num_tokens=2, finished=True)
        assert [num_tokens(each) async for each in first] == [2]
        assert client.aborted == []

    asyncio.run(run())


def test_a_slow_reader_of_a_stream_gets_only_the_newest_output():
    async def run() -> None:
        client = FakeClient()
        stream = outputs_of(Streams(client), "a")
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for count in range(1, 6):
            client.give("a", num_tokens=count, finished=count == 5)
        assert num_tokens(await step) == 5
        assert [each async for each in stream] == []

    asyncio.run(run())


def test_a_slow_reader_of_deltas_misses_nothing():
    async def run() -> None:
        client = FakeClient()
        params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
        stream = outputs_of(Streams(client), "a", params)
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        for count in (1, 2):
            client.give("a", num_tokens=count)
        deltas = [await step]
        for count in (3, 4, 5):
            client.give("a", num_tokens=count, finished=count == 5)
        deltas += [each async for each in stream]
        assert [each.outputs[0].token_ids for each in deltas] == [[0, 1], [2, 3, 4]]

    asyncio.run(run())


def test_a_reader_of_final_outputs_does_not_stream():
    async def run() -> None:
        client = FakeClient()
        params = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.FINAL_ONLY)
        step = asyncio.ensure_future(anext(outputs_of(Streams(client), "a", params)))
        await asyncio.sleep(0)
        assert not client.is_streamed
        client.give("a", num_tokens=1)
        client.give("a", num_tokens=2, finished=True)
        assert num_tokens(await step) == 2

    asyncio.run(run())


def test_an_output_that_comes_after_the_last_update_does_not_replace_it():
    """As when a rank's thread is about to deliver an output while another thread aborts the request."""

    async def run() -> None:
        client = FakeClient()
        stream = outputs_of(Streams(client), "a")
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        client.give("a", num_tokens=2, finished=True)
        client.give("a", num_tokens=1)
        assert num_tokens(await step) == 2
        assert [each async for each in stream] == []

    asyncio.run(run())


def test_a_stream_closed_before_its_end_aborts_its_request():
    async def run() -> None:
        client = FakeClient()
        stream = outputs_of(Streams(client), "a")
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        client.give("a")
        await step
        await stream.aclose()
        assert client.aborted == ["a"]
        client.give("a", finished=True)  # too late: nobody is there, and nothing breaks
        await asyncio.sleep(0)

    asyncio.run(run())


def test_an_error_ends_the_stream_and_aborts_nothing():
    async def run() -> None:
        client = FakeClient()
        stream = outputs_of(Streams(client), "a")
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        client.sinks["a"]([Update("a", error=EngineDeadError("gone"))])
        with pytest.raises(EngineDeadError, match="gone"):
            await step
        assert client.aborted == []

    asyncio.run(run())


def test_a_request_id_is_in_use_until_its_stream_has_ended():
    async def run() -> None:
        client = FakeClient()
        streams = Streams(client)
        first = outputs_of(streams, "a")
        step = asyncio.ensure_future(anext(first))
        await asyncio.sleep(0)
        client.give("a", num_tokens=3, finished=True)  # the client has done with it, the reader hasn't
        with pytest.raises(InvalidRequest, match="'a' is already in use"):
            await anext(outputs_of(streams, "a"))
        assert num_tokens(await step) == 3
        assert [each async for each in first] == []
        again = asyncio.ensure_future(anext(outputs_of(streams, "a")))
        await asyncio.sleep(0)
        client.give("a", num_tokens=4, finished=True)
        assert num_tokens(await again) == 4

    asyncio.run(run())


def test_a_constraint_is_checked_without_blocking_the_event_loop():
    async def run() -> None:
        client = FakeClient()
        is_compiled = threading.Event()
        threads: list[threading.Thread] = []

        def check(params: SamplingParams) -> None:
            threads.append(threading.current_thread())
            assert is_compiled.wait(LONG_S)

        client.check_structured_outputs = check
        params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
        step = asyncio.ensure_future(anext(outputs_of(Streams(client), "a", params)))
        while not threads:
            await asyncio.sleep(0.001)
        assert client.sinks == {}
        is_compiled.set()
        while not client.sinks:
            await asyncio.sleep(0.001)
        client.give("a", finished=True)
        await step
        assert threads != [threading.current_thread()]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_an_unknown_adapter_is_checked_without_blocking_the_event_loop():
    async def run() -> None:
        client = FakeClient()
        is_read = threading.Event()
        known: list[LoRARequest] = []
        threads: list[threading.Thread] = []

        def check(adapter: LoRARequest) -> None:
            threads.append(threading.current_thread())
            assert is_read.wait(LONG_S)
            known.append(adapter)

        client.adapters = MagicMock(check=check, __contains__=lambda _, adapter: adapter in known)
        streams, adapter = Streams(client), LoRARequest("a", 1, "/a")
        step = asyncio.ensure_future(anext(outputs_of(streams, "a", lora=adapter)))
        while not threads:
            await asyncio.sleep(0.001)
        assert client.sinks == {}
        is_read.set()
        while not client.sinks:
            await asyncio.sleep(0.001)
        client.give("a", finished=True)
        await step
        again = asyncio.ensure_future(anext(outputs_of(streams, "b", lora=adapter)))
        await asyncio.sleep(0)
        client.give("b", finished=True)
        await again
        assert len(threads) == 1
        assert threads != [threading.current_thread()]

    asyncio.run(asyncio.wait_for(run(), 20))


def test_updates_for_a_closed_event_loop_are_dropped_and_the_loop_is_not_kept():
    client = FakeClient()
    streams = Streams(client)

    async def run() -> weakref.ref[asyncio.AbstractEventLoop]:
        stream = outputs_of(streams, "a")
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        step.cancel()
        return weakref.ref(asyncio.get_running_loop())

    loop = asyncio.run(run())
    assert client.aborted == ["a"]
    client.give("a")
    gc.collect()
    assert loop() is None
    client.give("a")


class PoolingClient(FakeClient):
    """A client whose requests pool. All of a call are submitted together."""

    max_model_len = 8
    tokenizer = SimpleNamespace(truncation_side="right")

    def submit(self, asks: Sequence[Ask], sink: Sink) -> None:
        self.submitted = [ask.parsed.token_ids for ask in asks]
        self.sinks |= dict.fromkeys([ask.request_id for ask in asks], sink)

    def end(self, request_id: str, value: float | None = None, error: Exception | None = None) -> None:
        data = None if value is None else np.array([value], np.float32)
        output = None if error else PooledOutput(request_id, None, [1], [], True, data=data)
        self.sinks[request_id]([Update(request_id, output, error)])


async def pool(client: PoolingClient, *prompts: Any, **fields: Any) -> list[Any]:
    asks = [Ask(prompt, PoolingParams(), name, **fields) for prompt, name in zip(prompts, "abc", strict=False)]
    return [each async for each in Streams(client).ask(asks)]


def test_prompts_that_pool_are_submitted_together_and_their_results_keep_their_order():
    async def run() -> None:
        client = PoolingClient()
        pooling = asyncio.ensure_future(
            pool(client, [1], {"prompt_token_ids": list(range(9))}, tokenization=Tokenization(max_tokens=8))
        )
        await asyncio.sleep(0)
        assert client.submitted == [[1], list(range(8))]
        client.end("b", 2.0)
        client.end("a", 1.0)
        assert [float(each.outputs.data[0]) for each in await pooling] == [1.0, 2.0]
        assert client.aborted == []

    asyncio.run(run())


def test_a_prompt_that_pools_may_be_embeddings():
    async def run() -> None:
        client = PoolingClient()
        client.images = SimpleNamespace(embed=lambda where, fields: ([7] * fields["prompt_embeds"], [], []))
        pooling = asyncio.ensure_future(pool(client, {"prompt_embeds": 3}))
        await asyncio.sleep(0)
        if pooling.done():
            await pooling
        assert client.submitted == [[7, 7, 7]]
        client.end("a", 1.0)
        await pooling

    asyncio.run(run())


@pytest.mark.parametrize("end", ["fails", "is aborted", "is cancelled"])
def test_when_one_prompt_ends_otherwise_all_are_aborted(end):
    async def run() -> None:
        client = PoolingClient()
        pooling = asyncio.ensure_future(pool(client, [1], [2], [3]))
        await asyncio.sleep(0)
        client.end("a", 1.0)
        if end == "is cancelled":
            pooling.cancel()
        else:
            client.end("b", error=RequestFailed("worker died") if end == "fails" else None)
        expected = {"fails": RequestFailed, "is aborted": RequestFailed, "is cancelled": asyncio.CancelledError}[end]
        with pytest.raises(expected):
            await pooling
        assert client.aborted == ["a", "b", "c"]

    asyncio.run(run())


def test_a_request_that_was_added_gives_its_outputs_when_asked():
    async def run() -> None:
        client = FakeClient()
        added = await Streams(client).add(Ask(PROMPT, PARAMS, "a", stream=True))
        assert added.get_nowait() is None
        client.give("a", num_tokens=1)
        await asyncio.sleep(0)
        assert num_tokens(added.get_nowait()) == 1
        client.give("a", num_tokens=2, finished=True)
        assert (await added.get()).finished
        assert added.is_finished
        with pytest.raises(InvalidRequest, match="request a has no more outputs"):
            await added.get()
        added.close()
        assert client.aborted == []

    asyncio.run(run())


def test_closing_an_added_request_aborts_it_and_frees_its_id():
    async def run() -> None:
        client = FakeClient()
        streams = Streams(client)
        added = await streams.add(Ask(PROMPT, PARAMS, "a", stream=True))
        with pytest.raises(InvalidRequest, match="already in use"):
            await streams.add(Ask(PROMPT, PARAMS, "a", stream=True))
        added.close()
        added.close()
        assert client.aborted == ["a"]
        assert (await streams.add(Ask(PROMPT, PARAMS, "a", stream=True))).request_id == "a"

    asyncio.run(run())


def test_a_stream_of_text_is_one_of_tokens_if_outputs_are_made_of_tokens():
    async def asked(params: SamplingParams, interval: int = 1) -> object:
        client = FakeClient()
        client.stream_interval = interval
        stream = outputs_of(Streams(client), "a", params, stream="text")
        step = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        client.give("a", num_tokens=9, finished=True)
        await step
        return client.is_streamed

    assert asyncio.run(asked(PARAMS)) == "text"
    assert asyncio.run(asked(PARAMS, interval=2)) is True
    assert asyncio.run(asked(SamplingParams(stream_interval=3))) is True
    assert asyncio.run(asked(SamplingParams(output_kind=RequestOutputKind.DELTA))) is True
    assert asyncio.run(asked(SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY))) is False


def test_what_a_stream_has_is_true_false_or_text():
    async def begin() -> None:
        await anext(outputs_of(Streams(FakeClient()), "a", stream="tokens"))  # pyright: ignore

    with pytest.raises(InvalidRequest, match="stream='tokens' isn't True, False or 'text'"):
        asyncio.run(begin())
