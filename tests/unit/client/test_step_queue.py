"""Requests whose outputs are fetched step by step, with a client that the tests play."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from asks import asks

from raycore.client.ask import Ask
from raycore.client.request_state import PooledOutput
from raycore.client.step_queue import StepQueue
from raycore.client.updates import Sink, Update
from raycore.client.watchers import Watchers
from raycore.errors import EngineDeadError, InvalidRequest, RequestFailed
from raycore.outputs import CompletionOutput, PoolingRequestOutput, RequestOutput
from raycore.sampling_params import RequestOutputKind, SamplingParams


class FakeClient:
    """Takes requests; the test says what comes of them."""

    stream_interval = 1

    def __init__(self) -> None:
        self.watchers = Watchers()
        self.sink: Sink = lambda updates: None
        self.asks: Sequence[Ask] = []
        self.aborted: list[str] = []
        self.refuses = False

    def submit(self, asks: Sequence[Ask], sink: Sink) -> None:
        if self.refuses:
            raise InvalidRequest("refused")
        self.sink, self.asks = sink, asks

    def abort(self, request_ids: Sequence[str], notify: bool = False) -> None:
        self.aborted += request_ids

    def give(self, request_id: str, num_tokens: int, finished: bool = False) -> None:
        part = CompletionOutput(0, "x" * num_tokens, list(range(num_tokens)))
        self.sink([Update(request_id, RequestOutput(request_id, None, [1], outputs=[part], finished=finished))])

    def fail(self, request_id: str, error: BaseException) -> None:
        self.sink([Update(request_id, error=error)])


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def queue(client: FakeClient) -> StepQueue:
    return StepQueue(client)


def add(queue: StepQueue, *request_ids: str, stream: bool = True, **params: Any) -> None:
    queue.add(asks(*request_ids, prompt=[1, 2], params=SamplingParams(**params), stream=stream))


def tokens(queue: StepQueue) -> list[tuple[str, list[int]]]:
    outputs = queue.step(0.0)
    assert all(isinstance(each, RequestOutput) for each in outputs)
    return [(each.request_id, each.outputs[0].token_ids) for each in outputs]  # pyright: ignore


def test_a_step_returns_what_has_come_since_the_one_before(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a")
    add(queue, "b")
    assert (queue.num_unfinished, queue.request_ids, tokens(queue)) == (2, ["a", "b"], [])
    client.give("a", 1)
    client.give("a", 2)
    client.give("b", 1, finished=True)
    assert tokens(queue) == [("a", [0, 1]), ("b", [0])]
    assert (queue.num_unfinished, queue.request_ids) == (1, ["a"])
    client.give("a", 3, finished=True)
    client.give("a", 1)  # as from a thread that was about to deliver it
    assert tokens(queue) == [("a", [0, 1, 2])]
    assert queue.num_unfinished == 0
    client.give("a", 1)
    assert queue.step() == []


def test_slow_steps_lose_nothing_of_deltas(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a", output_kind=RequestOutputKind.DELTA)
    taken: list[int] = []
    for count in range(1, 8):
        client.give("a", count, finished=count == 7)
        if count in (1, 4, 7):
            taken += tokens(queue)[0][1]
    assert taken == list(range(7))


def test_a_step_waits_for_an_output_but_not_for_ever(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a")
    timer = threading.Timer(0.05, client.give, ("a", 1, True))
    timer.start()
    while not (outputs := queue.step(60.0)):
        pass
    assert outputs[0].finished
    timer.join()
    add(queue, "b")
    assert queue.step(0.01) == []


def test_requests_that_dont_stream_may_be_held_back(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a", "b", stream=False)
    assert not client.asks[0].stream
    add(queue, "c")
    assert client.asks[0].stream


def test_a_request_id_is_in_use_until_its_last_output_was_fetched(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a")
    client.give("a", 1, finished=True)
    with pytest.raises(InvalidRequest, match="request_id='a' is already in use"):
        add(queue, "b", "a")
    assert queue.request_ids == ["a"]
    queue.step()
    add(queue, "a")


def test_refused_requests_are_forgotten(client: FakeClient, queue: StepQueue) -> None:
    client.refuses = True
    with pytest.raises(InvalidRequest, match="refused"):
        add(queue, "a")
    assert queue.num_unfinished == 0


def test_aborted_requests_have_no_more_outputs(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a", "b")
    client.give("a", 1)
    queue.abort(["a", "unknown"])
    assert client.aborted == ["a"]
    client.give("a", 2, finished=True)
    assert (tokens(queue), queue.request_ids) == ([], ["b"])


def test_a_failed_request_costs_the_others_nothing(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a", "b", "c")
    client.give("a", 1)
    client.fail("b", RequestFailed("b failed"))
    client.fail("c", InvalidRequest("c is invalid"))
    assert tokens(queue) == [("a", [0])]
    assert queue.num_unfinished == 3
    for message in ("b failed", "c is invalid"):
        with pytest.raises((RequestFailed, InvalidRequest), match=message):
            queue.step()
    client.give("a", 2, finished=True)
    assert tokens(queue) == [("a", [0, 1])]
    assert queue.num_unfinished == 0


def test_the_end_of_an_engine_is_raised_once(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a", "b")
    for request_id in "ab":
        client.fail(request_id, EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        queue.step()
    assert (queue.step(), queue.num_unfinished) == ([], 0)


def test_requests_that_pool_have_their_own_outputs(client: FakeClient, queue: StepQueue) -> None:
    add(queue, "a", "b", stream=False)
    data = np.zeros(2, np.float32)
    client.sink([Update("a", PooledOutput("a", None, [1], finished=True, data=data))])
    client.sink([Update("b", PooledOutput("b", None, [1], finished=True))])
    [output] = queue.step()
    assert type(output) is PoolingRequestOutput
    assert output.outputs.data is data
    with pytest.raises(RequestFailed, match="request b was aborted"):
        queue.step()
