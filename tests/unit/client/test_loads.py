"""Several clients share ranks: each routes by what the ranks have now, whoever's requests those are."""

from __future__ import annotations

import uuid
from types import SimpleNamespace

import pytest
from asks import asks
from configs import make_config
from fake_streams import FakeStream
from waiting import LONG_S, eventually

from raycore.client import rank_connections
from raycore.client.client import EngineClient
from raycore.engine.decoding import decode_requests
from raycore.engine.mailbox import Mailbox
from raycore.engine.rank_events import RankUp
from raycore.messages import NO_LOAD, EngineInfo, EngineRequest, FinishedRequest, LoadView
from raycore.scheduler.outputs import StepOutputs

INFO = EngineInfo(0, 0, "", 100, 16, 100, "float32", {}, [])
OWN = 1
"""The index of the client that is looked at."""


class Rank:
    """An actor's handle: it keeps what is submitted, and its outputs are a mailbox's."""

    def __init__(self) -> None:
        self.got: list[EngineRequest] = []
        self.mailbox = Mailbox()
        self.submit = SimpleNamespace(remote=lambda message: self.got.extend(decode_requests(message)[0]))
        self.abort = SimpleNamespace(remote=lambda seq_ids: None)
        self.forget_client = SimpleNamespace(
            remote=lambda client, is_gone, number: self.mailbox.forget_client(
                client, is_gone=is_gone, connection=number
            )
        )
        self.outputs = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=self.mailbox.outputs))

    def finish_own(self, load: LoadView) -> None:
        """Everything that has been submitted."""
        ends = [FinishedRequest(request.seq_id, "length") for request in self.got]
        self.mailbox.publish(StepOutputs(finished=ends), load)
        self.got = []


@pytest.fixture
def ranks(monkeypatch):
    monkeypatch.setattr("raycore.engine.mailbox.IDLE_CHECK_S", 0.01)
    monkeypatch.setattr(rank_connections, "Stream", FakeStream)
    ranks = [Rank(), Rank()]
    yield ranks
    for rank in ranks:
        rank.mailbox.close()


@pytest.fixture
def client(tokenizer, ranks):
    client = EngineClient(make_config(), tokenizer, client_index=OWN)
    for dp_rank, rank in enumerate(ranks):
        client.on_rank_event(RankUp(dp_rank, rank, INFO))
    return client


def send(client: EngineClient, count: int) -> None:
    client.submit(asks(*(uuid.uuid4().hex for _ in range(count))), lambda updates: None)


def test_a_rank_that_was_full_gets_requests_again_once_its_own_requests_end(client: EngineClient, ranks: list[Rank]):
    full, free = ranks
    send(client, 2)
    assert [len(rank.got) for rank in ranks] == [1, 1]
    full.finish_own(LoadView(50, 8, 1.0))
    free.finish_own(LoadView(0, 0, 0.0))
    eventually(lambda: client.num_unfinished_requests == 0)
    send(client, 4)
    assert [len(rank.got) for rank in ranks] == [0, 4]
    # another client's requests have ended
    full.mailbox.note_load(LoadView(0, 0, 0.0))
    eventually(lambda: client._requests.router.loads()[0].num_requests == 0)
    send(client, 4)
    assert [len(rank.got) for rank in ranks] == [4, 4]


def test_a_rank_that_serves_again_has_one_stream_and_counts_its_batches_anew(client: EngineClient, ranks: list[Rank]):
    rank = ranks[0]
    client.ranks_leaving([1], 0.0)
    for number in (1, 2, 3):
        send(client, 1)
        assert len(rank.got) == 1
        rank.finish_own(NO_LOAD)
        eventually(lambda: client.num_unfinished_requests == 0)
        assert rank.mailbox.flush() == {OWN: 1}, f"the stream of round {number}"
        client.pause_new()
        assert client.complete_pause({0: (0, 1)}, False, LONG_S)
        client.ranks_leaving([0], 0.0)
        client.on_rank_event(RankUp(0, rank, INFO))
        client.resume_new()
