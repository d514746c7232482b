"""A client whose ranks misbehave. What it does with real ones is in tests/ray."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import msgspec
import pytest
from asks import asks
from configs import SPEC, make_config
from fake_streams import FakeStream
from waiting import LONG_S

from raycore.client import rank_connections
from raycore.client.ask import Ask, CheckedAsk
from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt
from raycore.config import EngineConfig
from raycore.engine.decoding import decode_requests
from raycore.engine.rank_events import EngineLost, RankUp
from raycore.errors import EngineDeadError
from raycore.messages import EngineInfo, EngineRequest, Feature, FeatureData, OutputBatch
from raycore.sampling_params import SamplingParams
from raycore.text.tokenizer import Tokenizer

INFO = EngineInfo(0, 0, "", 1000, 16, 256, "float32", {}, [])
ASKS = asks("a", "b", params=SamplingParams(max_tokens=4))


@pytest.fixture
def client(tokenizer: Tokenizer) -> EngineClient:
    return EngineClient(make_config(SPEC), tokenizer, limits=INFO)


def test_a_request_that_could_not_be_sent_to_its_rank_is_not_unfinished(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(submissions: object) -> None:
        raise MemoryError("no room for the message")

    with monkeypatch.context() as patched:
        patched.setattr(client._connections, "submit", fail)
        with pytest.raises(MemoryError):
            client.submit(ASKS, print)
    assert client.num_unfinished_requests == 0
    # its ids are free, and nothing keeps the engine from coming to an end
    client.submit(ASKS, print)
    client.abort(["a", "b"])
    assert client.drain(0.0)


def test_a_draining_client_refuses_new_requests(client: EngineClient) -> None:
    assert client.drain(0.0)
    with pytest.raises(EngineDeadError, match="draining"):
        client.submit(ASKS, print)


class _Outputs:
    """A rank's method that gives `parts`."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def options(self, num_returns: str) -> _Outputs:
        return self

    def remote(self, client_index: int, connection: int) -> Iterator[bytes]:
        return iter(self._parts)


class _Rank:
    def __init__(self, parts: list[bytes]) -> None:
        self.outputs = _Outputs(parts)


class _RankWithoutImages:
    """A rank that has none of the images that its client believes it has, and asks for them."""

    def __init__(self) -> None:
        self.got: list[EngineRequest] = []
        self.submit = SimpleNamespace(remote=self._take)
        self.outputs = self
        self._asked = threading.Event()
        self.is_answered = threading.Event()

    def _take(self, message: bytes) -> None:
        self.got += decode_requests(message)[0]
        if len(self.got) == 2:
            self._asked.set()
        elif len(self.got) == 3:
            self.is_answered.set()

    def options(self, num_returns: str) -> _RankWithoutImages:
        return self

    def remote(self, client_index: int, connection: int) -> Iterator[bytes]:
        assert self._asked.wait(LONG_S)
        lacking = self.got[1]
        yield msgspec.msgpack.encode(OutputBatch(missing_features=[(lacking.seq_id, ["image"])]))


def checked(ask: Ask) -> CheckedAsk:
    assert isinstance(ask.params, SamplingParams)
    return CheckedAsk(ask, ask.request_id, ask.priority, ask.data_parallel_rank, ask.params, [])


def test_a_rank_that_lacks_images_gets_them_again(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_connections, "Stream", FakeStream)
    monkeypatch.setattr(EngineConfig, "feature_cache_bytes", 100)
    client, rank = EngineClient(make_config(SPEC), tokenizer, limits=INFO), _RankWithoutImages()
    client.on_rank_event(RankUp(0, rank, INFO))
    prompt = ParsedPrompt(None, [5, 6], features=[Feature("image", 0, 1)], feature_data=[FeatureData(b"1", [1])])
    # a model of texts stands for one that sees images
    monkeypatch.setattr(client.checks, "complete", lambda asked: [checked(each) for each in asked])
    client.submit(asks("a", "b", prompt=prompt), print)
    assert rank.is_answered.wait(LONG_S)
    assert [each.feature_data[0] and each.feature_data[0].data for each in rank.got] == [b"1", None, b"1"]
    assert rank.got[2].seq_id == rank.got[1].seq_id


def test_a_rank_whose_outputs_cannot_be_processed_is_reported(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_connections, "Stream", FakeStream)
    reported: list[tuple[int, str]] = []
    client.on_broken_stream = lambda dp_rank, reason: reported.append((dp_rank, reason))
    client.on_rank_event(RankUp(3, _Rank([b"\xc1"]), INFO))
    assert client.join(LONG_S)
    ((dp_rank, reason),) = reported
    assert dp_rank == 3
    assert "DecodeError" in reason


def test_a_failure_raised_to_many_callers_does_not_collect_their_frames(client: EngineClient) -> None:
    client.on_rank_event(EngineLost(EngineDeadError("gone")))

    def depth() -> int:
        with pytest.raises(EngineDeadError) as raised:
            client.submit(ASKS, print)
        return len(raised.traceback)

    assert depth() == depth() == depth()
