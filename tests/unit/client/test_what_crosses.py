"""Whatever a client takes can be encoded, and decoded by a rank. Everything else is refused where it was given."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from asks import asks
from configs import make_config
from fake_streams import SilentStream

from raycore.client import rank_connections
from raycore.client.ask import Ask
from raycore.client.client import EngineClient
from raycore.client.inputs import parse_prompts
from raycore.client.streams import Streams
from raycore.engine.decoding import decode_requests
from raycore.engine.rank_events import RanksLost, RankUp
from raycore.errors import InvalidRequest
from raycore.messages import EngineInfo, EngineRequest
from raycore.sampling_params import MAX_INT, MIN_INT, SamplingParams
from raycore.structured_outputs import StructuredOutputsParams


class Text(str):
    pass


class Number(int):
    pass


class Fraction(float):
    pass


ODD_VALUES: list[Any] = [
    *(None, True, False, np.True_, 0, 1, 3, -1, 0.5, 1.5, float("nan"), float("inf"), 10**400, b"a", object()),
    *(MAX_INT, MAX_INT + 1, 2**64 - 1, 2**64, MIN_INT, MIN_INT - 1),
    *(np.int8(3), np.int64(3), np.uint64(2**64 - 1), np.float32(0.5), np.float64(0.5), Number(3), Fraction(0.5)),
    *("", "a", "\ud800", np.str_("a"), Text("a"), "a" * 100),
    *([], (), {}, set(), [3], [True], [np.int64(3)], [Number(3)], [2**64], [1.5], ["a"], [Text("a")], ["\ud800"], (3,)),
    *(
        [[3]],
        np.array([3, 4]),
        {3: 0.5},
        {np.int64(3): np.float32(0.5)},
        {2**64: 0.5},
        {"a": 1},
        {3: 10**400},
        {True: 1},
    ),
]
SHORT = [5, 6]
PARAMS_FIELDS = [name for name in SamplingParams.__struct_fields__ if name != "structured_outputs"]
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "json": {"json": "{}"},
    "choice": {"choice": ["a"]},
    "grammar": {"grammar": 'root ::= "a"'},
    "json_object": {"json_object": True},
}
"""By field: what a constraint with that field is made of, if not of a regex."""


class Rank:
    """Decodes what it is sent, as an engine does."""

    def __init__(self) -> None:
        self.got: list[EngineRequest] = []
        self.submit = SimpleNamespace(remote=self._take)
        self.abort = SimpleNamespace(remote=lambda seq_ids: None)
        self.forget_client = SimpleNamespace(remote=lambda *_: None)
        self.outputs = None

    def _take(self, message: bytes) -> None:
        requests, undecodable = decode_requests(message)
        assert undecodable == []
        self.got += requests


@pytest.fixture(autouse=True)
def _silent_ranks(monkeypatch):
    monkeypatch.setattr(rank_connections, "Stream", SilentStream)


@pytest.fixture
def rank() -> Rank:
    return Rank()


@pytest.fixture
def client(tokenizer, rank, monkeypatch) -> EngineClient:
    client = EngineClient(make_config(), tokenizer)
    # the tokenizer has another vocabulary
    monkeypatch.setattr(client.checks._constraints, "check_all", lambda asked: None)
    client.on_rank_event(RankUp(0, rank, EngineInfo(0, 0, "", 100, 16, 100, "float32", {}, [])))
    return client


def submit(client, rank, prompt: Any = SHORT, params: SamplingParams | None = None, **options) -> EngineRequest | None:
    """What the rank gets of a request; None if it is refused."""
    params = params or SamplingParams()
    try:
        parsed = parse_prompts([prompt], client.tokenizer)
        sent = asks(options.pop("request_id", "r"), prompt=parsed[0], params=params, **options)
        client.submit(sent, print)
    except InvalidRequest:
        assert client.num_unfinished_requests == 0
        return None
    (got,), rank.got = rank.got[:1], []
    client.abort([ask.request_id for ask in sent])
    return got


@pytest.mark.parametrize("name", PARAMS_FIELDS)
def test_any_assigned_sampling_param_is_refused_or_decoded_by_the_rank(client, rank, name):
    for value in ODD_VALUES:
        params = SamplingParams()
        setattr(params, name, value)
        got = submit(client, rank, params=params)
        try:
            given = SamplingParams(**{name: value})
        except InvalidRequest:
            assert got is None, value
        else:
            assert (got is None) == (submit(client, rank, params=given) is None), value
            assert got is None or got.params == given


@pytest.mark.parametrize("make", [lambda value: {"a": value}, lambda value: {"a": [{"b": value}]}])
def test_any_extra_argument_is_refused_or_decoded_by_the_rank(client, rank, make):
    for value in ODD_VALUES:
        submit(client, rank, params=SamplingParams(extra_args=make(value)) if _is_taken(make(value)) else None)


@pytest.mark.parametrize("args", [{"a": "\ud800"}, {"a": ["b", "\ud800"]}, {"a": {"\ud800": 1}}])
def test_extra_arguments_that_can_not_be_sent_are_refused(args):
    with pytest.raises(InvalidRequest, match=r"extra_args\['a'\].* contains half of a surrogate pair"):
        SamplingParams(extra_args=args)


def _is_taken(args: dict[str, Any]) -> bool:
    try:
        SamplingParams(extra_args=args)
    except InvalidRequest:
        return False
    return True


@pytest.mark.parametrize("name", StructuredOutputsParams.__struct_fields__)
def test_any_assigned_structured_outputs_are_refused_or_decoded_by_the_rank(client, rank, name):
    for value in ODD_VALUES:
        constraint = StructuredOutputsParams(after="b", **CONSTRAINTS.get(name, {"regex": "a*"}))
        setattr(constraint, name, value)
        submit(client, rank, params=SamplingParams(structured_outputs=constraint))


@pytest.mark.parametrize(
    "make",
    [
        lambda value: value,
        lambda value: {"prompt": value},
        lambda value: {"prompt_token_ids": [value, 6]},
        lambda value: {"prompt_token_ids": [6], "cache_salt": value},
    ],
    ids=["prompt", "text", "token", "salt"],
)
def test_any_prompt_is_refused_or_decoded_by_the_rank(client, rank, make):
    for value in ODD_VALUES:
        submit(client, rank, prompt=make(value))


def test_any_data_parallel_rank_is_refused_or_decoded_by_the_rank(client, rank):
    for value in ODD_VALUES:
        submit(client, rank, data_parallel_rank=value)
    with pytest.raises(InvalidRequest, match="data_parallel_rank=1"):
        client.submit(asks("a", prompt=[5], data_parallel_rank=1.5), print)


@pytest.mark.parametrize("name", ["request_id", "priority"])
def test_any_request_id_and_priority_is_refused_or_decoded_by_the_rank(client, rank, name):
    taken = []
    for value in ODD_VALUES:
        got = submit(client, rank, **{name: value})
        if got is not None:
            taken.append(got.request_id if name == "request_id" else got.priority)
    if name == "request_id":
        assert taken == ["", "a", "a", "a", "a" * 100]
        assert {type(each) for each in taken} == {str}
    else:
        assert taken == [0, 1, 3, -1, MAX_INT, MIN_INT, 3, 3, 3]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"request_id": 5}, "request_id=5 is"),
        ({"priority": 1.5}, "priority=1.5 isn't an integer"),
        ({"priority": True}, "priority=True isn't an integer"),
        ({"priority": 2**63}, f"priority={2**63} isn't in"),
    ],
)
def test_an_invalid_value_is_refused_by_its_name(client, options, named):
    with pytest.raises(InvalidRequest, match=named):
        client.submit(asks(options.pop("request_id", "a"), prompt=[5], **options), print)


def test_two_requests_of_one_call_cannot_have_one_id(client):
    with pytest.raises(InvalidRequest, match="'a'"):
        client.submit(asks("a", "a"), print)
    assert client.num_unfinished_requests == 0


@pytest.mark.parametrize("options", [{"request_id": 5}, {"request_id": []}, {"priority": 1.5}])
def test_streams_refuse_invalid_request_ids_and_priorities_too(client, options):
    async def scenario():
        async for _ in Streams(client).ask([Ask([5, 6], SamplingParams(), **{"request_id": "a", **options})]):
            pass

    with pytest.raises(InvalidRequest, match=next(iter(options))):
        asyncio.run(scenario())


def test_numpys_numbers_are_accepted_in_requests(client, rank):
    params = SamplingParams(
        max_tokens=np.int32(7), seed=np.uint8(5), temperature=np.float32(0.5), logit_bias={np.int64(3): np.float64(2)}
    )
    got = submit(client, rank, [np.int64(5), np.int32(6)], params, priority=np.int64(3), request_id=np.str_("a"))
    assert got is not None
    assert (got.prompt_token_ids, got.priority, got.request_id, got.seed) == ([5, 6], 3, "a", 5)
    assert (got.params.max_tokens, got.params.temperature, got.params.logit_bias) == (7, 0.5, {3: 2.0})


def test_sampling_params_changed_after_submission_do_not_change_the_request(client, rank):
    params = SamplingParams(stop_token_ids=[3])
    client.submit(asks("a", prompt=[5], params=params), print)
    params.stop_token_ids.append(1.5)
    params.max_tokens = "many"
    client.on_rank_event(RanksLost([0], 1))
    client.on_rank_event(RankUp(0, rank, EngineInfo(0, 0, "", 100, 16, 100, "float32", {}, [])))
    first, again = rank.got
    assert first.params == again.params
