"""What a client hands to a rank for one request. The rank is a list of what it got."""

from __future__ import annotations

import sys
import threading
import uuid
from types import SimpleNamespace

import msgspec
import pytest
from asks import asks
from configs import make_config
from fake_streams import FakeStream, SilentStream
from waiting import LONG_S

from raycore.beam_search import BeamSearchParams
from raycore.client import rank_connections
from raycore.client.client import EngineClient
from raycore.client.inputs import ParsedPrompt
from raycore.engine.rank_events import RanksLost, RankUp
from raycore.errors import EngineDeadError, InvalidRequest
from raycore.messages import EngineInfo, EngineRequest
from raycore.parts.constraints.config.structured_outputs import parse_structured_outputs_config
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.no_tokenizer import NoTokenizer

PROMPT = ParsedPrompt(None, [5, 6, 7])
INFO = EngineInfo(0, 0, "", 100, 16, 100, "float32", {}, [])


class Rank:
    """An actor's handle: it keeps what is submitted, and says nothing."""

    def __init__(self) -> None:
        self.got: list[EngineRequest] = []
        self.submit = SimpleNamespace(remote=self._take)
        self.abort = SimpleNamespace(remote=lambda seq_ids: None)
        self.forget_client = SimpleNamespace(remote=lambda *_: None)
        self.outputs = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *_: []))

    def _take(self, payload: bytes) -> None:
        self.got += msgspec.msgpack.decode(payload, type=list[EngineRequest])


@pytest.fixture(autouse=True)
def _silent_ranks(monkeypatch):
    monkeypatch.setattr(rank_connections, "Stream", SilentStream)


@pytest.fixture
def rank():
    return Rank()


@pytest.fixture
def client(tokenizer, rank):
    client = EngineClient(make_config(), tokenizer)
    client.on_rank_event(RankUp(0, rank, INFO))
    return client


def can_be_acquired(lock) -> bool:
    """Whether this thread doesn't hold it for ever. A client's other threads hold it now and then."""
    if not lock.acquire(timeout=LONG_S):
        return False
    lock.release()
    return True


def submit_ask(client, params=None, prompt=PROMPT, **fields):
    client.submit(asks(uuid.uuid4().hex, prompt=prompt, params=params, **fields), lambda updates: None)


def submit(client, **params):
    submit_ask(client, SamplingParams(**params))


def test_json_is_compact_if_the_engine_says_so(tokenizer, rank, monkeypatch):
    checked = []
    for is_compact in (False, True):
        settings = parse_structured_outputs_config({"disable_any_whitespace": is_compact, "reasoning_parser": "qwen3"})
        config = msgspec.structs.replace(make_config(), structured_outputs_config=settings)
        client = EngineClient(config, tokenizer)
        gate = SimpleNamespace(check=checked.append, check_all=checked.extend)
        monkeypatch.setattr(client.checks, "_constraints", gate)
        client.on_rank_event(RankUp(0, rank, INFO))
        params = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))
        client.checks.check_structured_outputs(params)
        submit_ask(client, params)
        assert [each.disable_any_whitespace for each in (*checked, rank.got[-1].params.structured_outputs)] == [
            is_compact
        ] * 3
        assert params.structured_outputs.disable_any_whitespace is False
        checked.clear()


def test_without_a_tokenizer_outputs_have_no_text_and_what_needs_one_is_refused(rank):
    client = EngineClient(make_config(), NoTokenizer(300))
    client.on_rank_event(RankUp(0, rank, INFO))
    for asked in ({"stop": ["x"]}, {"structured_outputs": StructuredOutputsParams(choice=["a"])}, {"bad_words": ["x"]}):
        with pytest.raises(InvalidRequest, match="skip_tokenizer_init=True"):
            submit(client, **asked)
    with pytest.raises(InvalidRequest, match="beam search needs a tokenizer"):
        client.checks.beam_search(*asks("a", params=BeamSearchParams(beam_width=2, max_tokens=4)))
    params = SamplingParams()
    submit_ask(client, params)
    assert len(rank.got) == 1
    assert params.detokenize


def test_only_the_first_of_n_sequences_computes_prompt_logprobs(client, rank):
    submit(client, n=3, prompt_logprobs=2, logprobs=1)
    assert [sequence.params.prompt_logprobs for sequence in rank.got] == [2, None, None]
    assert [sequence.params.logprobs for sequence in rank.got] == [1, 1, 1]


def test_only_the_first_of_n_sequences_returns_the_prompts_hidden_states(client, rank):
    submit(client, n=2, return_prompt_hidden_states=True, return_hidden_states=True)
    assert [sequence.params.return_prompt_hidden_states for sequence in rank.got] == [True, False]
    assert all(sequence.params.return_hidden_states for sequence in rank.got)


def test_bad_words_are_tokenized_without_holding_the_clients_lock(client, rank, tokenizer, monkeypatch):
    words_ids = tokenizer.bad_words_token_ids(["the"])

    def spell(words):
        assert can_be_acquired(client._lock)
        return words_ids if words else []

    monkeypatch.setattr(tokenizer, "bad_words_token_ids", spell)
    submit(client, n=2, bad_words=["the"])
    assert [sequence.bad_words_token_ids for sequence in rank.got] == [words_ids, words_ids]


def test_every_sequence_keeps_its_cache_salt_also_on_another_rank(client, rank):
    submit_ask(client, SamplingParams(n=2), ParsedPrompt(None, [5, 6, 7], "s"))
    assert [sequence.cache_salt for sequence in rank.got] == ["s", "s"]
    other = Rank()
    client.on_rank_event(RanksLost([0], 1))
    client.on_rank_event(RankUp(1, other, INFO))
    assert [sequence.cache_salt for sequence in other.got] == ["s", "s"]


def test_a_request_goes_to_the_rank_that_it_names(client, rank):
    other = Rank()
    client.on_rank_event(RankUp(1, other, INFO))
    for _ in range(3):
        submit_ask(client, data_parallel_rank=1)
    assert (len(rank.got), len(other.got)) == (0, 3)


@pytest.mark.parametrize("dp_rank", [2, -1, "1", 1.0, True])
def test_a_request_that_names_a_rank_which_the_engine_lacks_is_refused(client, rank, dp_rank):
    client.on_rank_event(RankUp(1, Rank(), INFO))
    with pytest.raises(InvalidRequest, match=f"data_parallel_rank={dp_rank!r} isn't "):
        submit_ask(client, data_parallel_rank=dp_rank)
    assert rank.got == []


def test_while_a_named_rank_is_replaced_another_takes_its_requests(client, rank):
    client.on_rank_event(RankUp(1, Rank(), INFO))
    client.on_rank_event(RanksLost([1], 1))
    submit_ask(client, data_parallel_rank=1)
    assert len(rank.got) == 1
    client.on_rank_event(RankUp(1, Rank(), INFO))
    client.ranks_leaving([1], 0.0, come_back=True)
    submit_ask(client, data_parallel_rank=1)
    assert len(rank.got) == 2
    client.ranks_leaving([1], 0.0)
    with pytest.raises(InvalidRequest, match="data_parallel_rank=1"):
        submit_ask(client, data_parallel_rank=1)


def test_a_client_that_joins_while_a_named_rank_is_away_sends_its_requests_to_others(client, rank):
    client.on_rank_event(RanksLost([1], 0))
    submit_ask(client, data_parallel_rank=1)
    assert len(rank.got) == 1


def test_an_abandoned_client_sends_no_request_and_delivers_no_update(tokenizer, rank, monkeypatch):
    """As the interpreter exits: errors on the daemon threads that are left would only be printed."""
    monkeypatch.setattr(rank_connections, "Stream", FakeStream)  # which ends
    client = EngineClient(make_config(), tokenizer)
    client.on_rank_event(RankUp(0, rank, INFO))
    updates = []
    client.submit(asks("a"), updates.extend)
    client.abandon()
    assert client.join(LONG_S)
    late = threading.Thread(target=submit, args=(client,), daemon=True)
    late.start()
    with pytest.raises(EngineDeadError, match="the program is exiting"):
        submit(client)  # not on a daemon thread
    late.join(0.2)
    assert late.is_alive()
    client.on_rank_event(RanksLost([0], 1))
    client.on_rank_event(RankUp(1, rank, INFO))
    assert len(rank.got) == 1
    assert updates == []


def test_a_rank_that_can_not_be_sent_requests_that_wait_is_reported_and_they_move(tokenizer):
    def fail(payload: bytes) -> None:
        raise MemoryError("the store is full")

    client, told = EngineClient(make_config(), tokenizer, limits=INFO), []
    client.on_broken_stream = lambda dp_rank, reason: told.append((dp_rank, reason))
    submit(client)
    broken, whole = Rank(), Rank()
    broken.submit = SimpleNamespace(remote=fail)
    client.on_rank_event(RankUp(0, broken, INFO))
    assert told == [(0, "it can't be sent requests: MemoryError: the store is full")]
    client.on_rank_event(RankUp(1, whole, INFO))
    client.on_rank_event(RanksLost([0], 1))
    assert len(whole.got) == 1


def test_an_interrupt_in_any_call_within_submit_leaves_no_request_and_no_held_lock(tokenizer):
    """A signal's handler may raise an exception wherever a function begins, in the thread that submits."""
    num_calls = submit_interrupted_at(sys.maxsize, tokenizer)
    assert num_calls > 10
    for number in range(num_calls):
        submit_interrupted_at(number, tokenizer)


def submit_interrupted_at(number: int, tokenizer) -> int:
    """Submit, and raise KeyboardInterrupt in the call with this number, from 0. Returns how many calls there were."""
    client = EngineClient(make_config(), tokenizer)
    client.on_rank_event(RankUp(0, Rank(), INFO))
    num_calls = 0

    def interrupt(frame, event, arg):
        nonlocal num_calls
        num_calls += 1
        if num_calls > number:
            sys.settrace(None)
            raise KeyboardInterrupt

    both = [*asks("a", params=SamplingParams(n=2)), *asks("b", params=SamplingParams(seed=1))]
    tracer = sys.gettrace()
    sys.settrace(interrupt)
    try:
        client.submit(both, lambda updates: None)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(tracer)
    assert can_be_acquired(client._lock), number
    client.abort(["a", "b"])
    assert client.num_unfinished_requests == 0
    client.submit(both, lambda updates: None)
    assert client.num_unfinished_requests == 2
    assert (client._requests.router.num_own(0), client.num_on_ranks()) == (2, {0: 2}), number
    return num_calls
