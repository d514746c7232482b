"""Clients of a paused engine: which requests are older than the pause, and when all outputs have arrived."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from asks import asks
from configs import SPEC, make_config
from waiting import LONG_S

from raycore.client.client import EngineClient
from raycore.client.rank_connections import RankConnections
from raycore.client.receiver import Receiver
from raycore.client.updates import Update
from raycore.engine.rank_events import EngineLost, RanksLost, RankUp
from raycore.errors import EngineDeadError
from raycore.messages import EngineInfo, EngineRequest, FinishedRequest, OutputBatch
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer


class Rank:
    """A rank that takes notes, and whose outputs the test makes."""

    def __init__(self) -> None:
        self.requests: dict[str, EngineRequest] = {}
        self.aborted: list[int] = []
        self.submit = SimpleNamespace(remote=self._submit)
        self.abort = SimpleNamespace(remote=self.aborted.extend)
        self.forget_client = SimpleNamespace(remote=lambda *_: None)

    def _submit(self, message: bytes) -> None:
        for each in msgspec.msgpack.decode(message, type=list[EngineRequest]):
            self.requests[each.request_id] = each


class Clients:
    """A client with one rank, and what its callers have heard."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.client = EngineClient(make_config(SPEC), tokenizer)
        self.rank = Rank()
        self.heard: list[Update] = []
        self.up(self.rank)

    def up(self, rank: Rank, pid: int = 7) -> None:
        info = EngineInfo(0, pid, "node", 1000, 16, 256, "float32", {}, [])
        self.client.on_rank_event(RankUp(0, rank, info))  # pyright: ignore[reportArgumentType]

    def submit(self, *request_ids: str) -> None:
        params = SamplingParams(max_tokens=9)
        self.client.submit(asks(*request_ids, prompt=[5, 6], params=params), self.heard.extend)

    def deliver(self, request_id: str, *, finished: bool = False) -> None:
        """Deliver a token of a request from the rank."""
        (connection,) = self.client._connections.all()
        seq_id = self.rank.requests[request_id].seq_id
        batch = OutputBatch(
            seq_ids=np.int64(seq_id).tobytes(),
            token_ids=np.int32(9).tobytes(),
            steps=[(1, 0.0, 0.0)],
            finished=[FinishedRequest(seq_id, "length")] if finished else [],
        )
        self.client._deliver(connection, batch)

    def ends(self) -> dict[str, tuple[str | None, int]]:
        """By request id: the finish reason and the number of tokens."""
        outputs = [update.output for update in self.heard if update.output is not None]
        return {each.request_id: (each.outputs[0].finish_reason, len(each.outputs[0].token_ids)) for each in outputs}


@pytest.fixture
def clients(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Clients:
    monkeypatch.setattr(Receiver, "add", lambda *args: None)
    return Clients(tokenizer)


def test_requests_submitted_during_a_pause_wait_in_the_client(clients: Clients) -> None:
    clients.client.pause_new()
    clients.submit("a", "b")
    clients.client.abort(["a"])
    assert clients.rank.requests == {}
    assert (clients.client.num_unfinished_requests, clients.client.num_waiting_for_rank) == (1, 1)
    clients.client.resume_new()
    assert set(clients.rank.requests) == {"b"}
    clients.submit("c")
    assert set(clients.rank.requests) == {"b", "c"}


def test_a_rank_that_comes_up_in_a_pause_gets_only_older_requests(clients: Clients) -> None:
    clients.submit("old")
    clients.client.pause_new()
    clients.submit("new")
    clients.client.on_rank_event(RanksLost([0], 1))
    clients.up(successor := Rank(), pid=8)
    assert set(successor.requests) == {"old"}
    clients.client.resume_new()
    assert set(successor.requests) == {"old", "new"}


def test_complete_pause_aborts_older_requests_after_all_outputs_have_come(clients: Clients) -> None:
    clients.submit("old")
    clients.deliver("old")
    clients.client.pause_new()
    clients.submit("new")
    with ThreadPoolExecutor() as pool:
        done = pool.submit(clients.client.complete_pause, {0: (7, 2)}, True, LONG_S)
        assert not clients.ends()
        clients.deliver("old")
        assert done.result(LONG_S)
    assert clients.ends() == {"old": ("abort", 2)}
    assert clients.rank.aborted == [clients.rank.requests["old"].seq_id]
    clients.client.resume_new()
    assert set(clients.rank.requests) == {"old", "new"}


@pytest.mark.parametrize("sent", [{}, {0: (7, 0)}, {0: (8, 3)}, {1: (7, 3)}])
def test_complete_pause_does_not_wait_for_ranks_that_are_gone_or_sent_nothing(clients: Clients, sent: Any) -> None:
    clients.client.pause_new()
    assert clients.client.complete_pause(sent, False, LONG_S)


def test_complete_pause_aborts_nothing_if_outputs_do_not_come_in_time(clients: Clients) -> None:
    clients.submit("old")
    clients.client.pause_new()
    assert not clients.client.complete_pause({0: (7, 1)}, True, 0.01)
    assert clients.client.num_unfinished_requests == 1


@pytest.mark.parametrize(
    "leave",
    [lambda client: client.on_rank_event(RanksLost([0], 1)), lambda client: client.ranks_leaving([0], 0.0)],
    ids=["lost", "leaves"],
)
def test_complete_pause_stops_waiting_for_a_rank_that_is_lost_or_leaves(
    clients: Clients, monkeypatch: pytest.MonkeyPatch, leave: Callable[[EngineClient], None]
) -> None:
    clients.client.pause_new()
    is_waiting = threading.Event()
    has_received = RankConnections.has_received

    def noted(connections: RankConnections, sent: Any) -> bool:
        is_waiting.set()
        return has_received(connections, sent)

    monkeypatch.setattr(RankConnections, "has_received", noted)
    with ThreadPoolExecutor() as pool:
        done = pool.submit(clients.client.complete_pause, {0: (7, 1)}, True, 600.0)
        assert is_waiting.wait(LONG_S)
        leave(clients.client)
        assert done.result(LONG_S)


def test_a_second_pause_counts_the_requests_of_the_first_as_older(clients: Clients) -> None:
    clients.client.pause_new()
    clients.submit("between")
    clients.client.pause_new()
    clients.submit("after")
    assert clients.client.complete_pause({}, True, LONG_S)
    assert clients.ends() == {"between": ("abort", 0)}


@pytest.mark.parametrize("end", ["finish", "release", "fail"])
def test_wait_for_older_says_whether_the_older_requests_ended_or_the_pause_did(clients: Clients, end: str) -> None:
    clients.submit("old")
    clients.client.pause_new()
    clients.submit("new")
    started = threading.Event()

    def wait() -> bool:
        started.set()
        return clients.client.wait_for_older()

    with ThreadPoolExecutor() as pool:
        done = pool.submit(wait)
        assert started.wait(LONG_S)
        if end == "finish":
            clients.deliver("old", finished=True)
        elif end == "release":
            clients.client.resume_new()
        else:
            clients.client.on_rank_event(EngineLost(EngineDeadError("gone")))
        assert done.result(LONG_S) == (end != "release")
