"""A client whose ranks misbehave. What it does with real ones is in tests/ray."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from asks import asks
from configs import SPEC, make_config
from fake_streams import FakeStream
from waiting import LONG_S

from raycore.client import rank_connections
from raycore.client.client import EngineClient
from raycore.engine.rank_events import EngineLost, RankUp
from raycore.errors import EngineDeadError
from raycore.messages import EngineInfo
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
