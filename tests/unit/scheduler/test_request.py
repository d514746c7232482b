"""What is refused, with which numbers, and when a request ends."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from configs import make_config
from msgspec.structs import replace

from raycore.cache_layout import CacheGroup, CacheLayout, CacheLimits
from raycore.config.logits_processors import ProcessorClass
from raycore.engine.scheduling import Shared, make_scheduler
from raycore.errors import InvalidRequest, RequestTooLarge
from raycore.messages import EngineRequest, ThinkingLimit
from raycore.sampling_params import SamplingParams
from raycore.scheduler.request import Request, RequestLimits

LIMITS = RequestLimits(vocab_size=100, max_model_len=32, block_size=4, num_blocks=6)


def admit(
    prompt: list[int], *, output: list[int] | None = None, eos: list[int] | None = None, **params: Any
) -> Request:
    message = EngineRequest(
        1, "r1", prompt, SamplingParams(**params), 0, eos_token_ids=eos or [], output_token_ids=output or []
    )
    return LIMITS.admit(message, arrival=0)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([1] * 32, {}, ["32", "max_model_len", "Shorten"]),
        ([1] * 40, {}, ["40", "32"]),
        ([1] * 16, {"max_tokens": 10}, ["16 prompt tokens and max_tokens=10 need", "25", "24 (6 blocks of 4)"]),
        ([1] * 8, {"max_tokens": None}, ["31", "24 (6 blocks of 4)"]),
    ],
)
def test_requests_larger_than_the_limits_are_refused_with_the_numbers(
    prompt: list[int], params: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(RequestTooLarge) as error:
        admit(prompt, **params)
    with pytest.raises(RequestTooLarge, match=re.escape(str(error.value))):
        LIMITS.check(prompt, SamplingParams(**params))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_last_token_needs_no_room_in_the_cache() -> None:
    assert admit([1] * 16, max_tokens=9).max_tokens == 25


@pytest.mark.parametrize(
    ("prompt", "options", "word"),
    [
        ([], {}, "no tokens"),
        ([1, 100], {}, "100"),
        ([-1, 3], {}, "-1"),
        ([2**70], {}, str(2**70)),
        ([1], {"output": [200]}, "output_token_ids contains token id 200"),
        ([1], {"output": [2, 3], "max_tokens": 2}, "nothing left"),
        ([1], {"allowed_token_ids": [5, 100]}, "allowed_token_ids contains token id 100"),
        ([1], {"stop_token_ids": [100]}, "stop_token_ids contains token id 100"),
        ([1], {"stop_token_ids": [5] * 101}, "stop_token_ids has 101 entries"),
        ([1], {"logit_bias": {100: 1.0}}, "logit_bias contains token id 100"),
        ([1], {"logprobs": 101}, "logprobs=101"),
        ([1], {"prompt_logprobs": 101}, "prompt_logprobs=101"),
    ],
)
def test_invalid_requests_are_refused_by_name(prompt: list[int], options: dict[str, Any], word: str) -> None:
    with pytest.raises(InvalidRequest, match=word):
        admit(prompt, **options)


def test_windows_need_blocks_for_what_tokens_see() -> None:
    groups = CacheGroup("full", (0,)), CacheGroup("window", (1,), 5)
    layout = CacheLayout(groups, CacheLimits(4, 32, 8))
    limits = RequestLimits(100, 32, 4, num_blocks=9, layout=layout)
    limits.check([1] * 16, SamplingParams(max_tokens=5))
    with pytest.raises(RequestTooLarge, match=r"21 tokens \(10 blocks\).*9 blocks of 4"):
        limits.check([1] * 16, SamplingParams(max_tokens=6))


def test_max_tokens_defaults_to_the_rest_of_the_models_length() -> None:
    limits = RequestLimits(100, 32, 4, 100)
    assert limits.admit(EngineRequest(1, "r", [1], SamplingParams(max_tokens=None), 0), 0).max_tokens == 32
    assert limits.admit(EngineRequest(1, "r", [1], SamplingParams(max_tokens=99), 0), 0).max_tokens == 32


def test_a_request_ends_at_stop_tokens_after_min_tokens_and_at_its_length() -> None:
    request = admit([1] * 4, eos=[7, 8, 3000], stop_token_ids=[9], max_tokens=5, min_tokens=2)
    assert request.stop_token_ids == {7, 8, 9}
    assert request.end_of(7, 5) is None, "before min_tokens"
    assert request.end_of(7, 6) == ("stop", None)
    assert request.end_of(9, 6) == ("stop", 9)
    assert request.end_of(1, 6) is None
    assert request.end_of(1, 9) == ("length", None)
    assert request.end_of(8, 9) == ("stop", None), "the token says more than the limit"


def test_ignored_eos_ends_only_as_a_stop_token() -> None:
    assert admit([1], eos=[7], ignore_eos=True).end_of(7, 3) is None
    assert admit([1], eos=[7], ignore_eos=True, stop_token_ids=[7]).end_of(7, 3) == ("stop", 7)


def test_max_logprobs_limits_log_probabilities() -> None:
    limits = RequestLimits(100, 32, 4, 100, max_logprobs=20)
    limits.check([1], SamplingParams(logprobs=20, prompt_logprobs=20))
    for name, count in (("logprobs", 21), ("prompt_logprobs", -1)):
        with pytest.raises(InvalidRequest, match=rf"{name}={count}.* is more than max_logprobs=20"):
            limits.check([1], SamplingParams(**{name: count}))
    for most in (None, -1, 100):
        RequestLimits(100, 32, 4, 100, max_logprobs=most).check([1], SamplingParams(logprobs=-1))
    with pytest.raises(InvalidRequest, match="logprob_token_ids contains token id 100"):
        limits.check([1], SamplingParams(logprob_token_ids=[100]))


def test_a_replay_that_would_be_cut_is_refused() -> None:
    limits = RequestLimits(100, 32, 4, 100)
    limits.check([1] * 22, SamplingParams(trace_decode_token_ids=[5] * 10))
    with pytest.raises(RequestTooLarge, match=r"has 11 tokens and the prompt 22, .* max_model_len=32: .* be cut"):
        limits.check([1] * 22, SamplingParams(trace_decode_token_ids=[5] * 11))


def test_workers_are_told_the_limit_of_a_request_s_reasoning() -> None:
    message = EngineRequest(1, "r1", [1], SamplingParams(), 0, thinking=ThinkingLimit(5, [2], [3], [3]))
    request = LIMITS.admit(message, arrival=0)
    request.slot = 0
    assert request.for_workers(0, np.zeros((1, 1), np.int32)).thinking == message.thinking


def test_requests_wait_for_their_last_tokens_where_logits_processors_see_them() -> None:
    told: list[Any] = []

    class Notes:
        def __init__(self, *args: Any, **options: Any) -> None:
            told.append(options.get("waits_for_output"))

    for processors in ((), (ProcessorClass("module:Class"),)):
        config = replace(make_config(), logits_processors=processors)
        make_scheduler(Notes, config, SimpleNamespace(num_blocks=8, layout=None), Shared())  # pyright: ignore
    assert told == [None, True]
