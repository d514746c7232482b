"""What a client hands to a rank for one request. The rank is a list of what it got."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
from configs import make_config

from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt
from raycore.messages import EngineInfo, EngineRequest
from raycore.sampling_params import SamplingParams

PROMPT = ParsedPrompt(None, [5, 6, 7])


class Rank:
    """An actor's seq_id: it keeps what is submitted, and says nothing."""

    def __init__(self) -> None:
        self.got: list[EngineRequest] = []
        self.submit = SimpleNamespace(remote=self._take)
        self.outputs = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: []))

    def _take(self, payload: bytes) -> None:
        self.got += msgspec.msgpack.decode(payload, type=list[EngineRequest])


@pytest.fixture
def rank():
    return Rank()


@pytest.fixture
def client(tokenizer, rank):
    client = EngineClient(make_config(), tokenizer)
    client.rank_up(0, rank, EngineInfo(0, 0, "", 100, 16, 100, "float32", {}, []))
    return client


def submit(client, **params):
    client.submit([PROMPT], [SamplingParams(**params)], lambda updates: None)


def test_only_the_first_sequence_has_the_prompts_logprobs_made(client, rank):
    submit(client, n=3, prompt_logprobs=2, logprobs=1)
    assert [sequence.params.prompt_logprobs for sequence in rank.got] == [2, None, None]
    assert [sequence.params.logprobs for sequence in rank.got] == [1, 1, 1]


def test_bad_words_become_tokens_while_others_can_go_on(client, rank, tokenizer, monkeypatch):
    words_ids = tokenizer.bad_words_token_ids(["the"])

    def spell(words):
        assert not client._lock.locked()
        return words_ids if words else []

    monkeypatch.setattr(tokenizer, "bad_words_token_ids", spell)
    submit(client, n=2, bad_words=["the"])
    assert [sequence.bad_words_token_ids for sequence in rank.got] == [words_ids, words_ids]
