"""Reasoning that has had its number of tokens is ended by the tokens of its closing tag."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from configs import make_config
from hypothesis import given, settings
from hypothesis import strategies as st
from small_model import make_sampling

from raycore.config import resolve
from raycore.demo import demo_model_path
from raycore.errors import InvalidConfig, InvalidRequest
from raycore.messages import ThinkingLimit
from raycore.parts.constraints.client import ThinkingLimits
from raycore.parts.constraints.sampling import forced_token
from raycore.reasoning_tags import TAGS, ReasoningTags
from raycore.sampling.sampler import Sampler
from raycore.sampling_params import SamplingParams
from raycore.server.parsers.reasoning import PARSERS, tags_of
from raycore.text.tokenizer import Tokenizer

OPEN, CLOSE, PHRASE = [1], [2, 3], [9, 2, 3]


def limit(most, *, is_open=None, forced=CLOSE, opening=OPEN) -> ThinkingLimit:
    return ThinkingLimit(most, opening, CLOSE, forced, is_open)


def written(limit_: ThinkingLimit, prompt: list[int], wanted: list[int]) -> list[int]:
    """The output of a model that wants to write these tokens."""
    output: list[int] = []
    for token_id in wanted:
        forced = forced_token(limit_, np.array(prompt + output, np.int32), len(prompt))
        output.append(token_id if forced is None else forced)
    return output


@pytest.mark.parametrize(
    ("case", "prompt", "wanted", "expected"),
    [
        (limit(3), [7, 1], [5] * 8, [5, 5, 5, 2, 3, 5, 5, 5]),
        (limit(0), [7, 1], [5] * 4, [2, 3, 5, 5]),
        (limit(3), [7, 1, 6, 6], [5] * 5, [5, 2, 3, 5, 5]),  # the prompt's reasoning counts
        (limit(1), [7, 1, 6, 6], [5] * 4, [2, 3, 5, 5]),
        (limit(3), [7], [5] * 6, [5] * 6),  # no reasoning
        (limit(2), [7], [5, 1, 5, 5, 5, 5], [5, 1, 5, 5, 2, 3]),
        (limit(4), [7, 1], [5, 2, 3, 5, 5, 5, 5], [5, 2, 3, 5, 5, 5, 5]),  # it ends in time
        (limit(2), [7, 1], [5, 2, 3, 5, 1, 5, 5, 5, 5], [5, 2, 3, 5, 1, 5, 5, 2, 3]),  # a second one
        (limit(2), [7, 1], [5, 2, 5, 5, 5], [5, 2, 3, 5, 5]),  # a tag that has begun is completed
        (limit(2), [7, 1, 2, 3], [5] * 4, [5] * 4),
        (limit(2, forced=PHRASE), [7, 1], [5] * 7, [5, 5, 9, 2, 3, 5, 5]),
        (limit(2, forced=[9]), [7, 1], [5] * 5, [5, 5, 9, 5, 5]),
        (limit(2, is_open=True), [7], [5] * 6, [5, 5, 2, 3, 5, 5]),
        (limit(2, is_open=True), [7, 1, 6, 6, 6], [5] * 6, [5, 5, 2, 3, 5, 5]),  # it may be an instruction's tag
        (limit(2, is_open=True), [7], [1, 5, 5, 5, 5], [1, 5, 5, 2, 3]),  # the model opens it itself
        (limit(2, is_open=False), [7, 1, 6], [5] * 4, [5] * 4),
        (limit(2, is_open=False), [7], [1, 5, 5, 5, 5], [1, 5, 5, 2, 3]),
        (limit(2, opening=[8, 1]), [1, 8, 1], [5] * 4, [5, 5, 2, 3]),
        (limit(2, opening=[8, 1]), [8, 5, 1], [5] * 4, [5] * 4),
    ],
)
def test_reasoning_ends_after_its_number_of_tokens(case, prompt, wanted, expected):
    assert written(case, prompt, wanted) == expected


@given(
    st.integers(0, 6),
    st.lists(st.integers(1, 5), max_size=6),
    st.lists(st.integers(1, 5), max_size=30),
    st.sampled_from([None, True, False]),
    st.sampled_from([CLOSE, PHRASE]),
)
@settings(max_examples=300)
def test_no_reasoning_has_more_tokens_and_none_that_is_shorter_changes(most, prompt, wanted, is_open, forced):
    case = limit(most, is_open=is_open, forced=forced)
    output = written(case, prompt, wanted)
    num_thought, thinks = 0, is_open is True
    for index, token_id in enumerate(output):
        if output[: index + 1][-2:] == CLOSE:
            thinks = False
        elif token_id == 1:
            num_thought, thinks = 0, True
        elif thinks:
            num_thought += 1
            assert num_thought <= most + len(forced)
    unlimited = written(limit(1000, is_open=is_open), prompt, wanted)
    assert unlimited == wanted
    assert written(limit(most, is_open=is_open), [5], [4] * 20)[:most] == [4] * most


class Sliced(list):
    """Counts its slices."""

    num_slices = 0

    def __getitem__(self, index):
        self.num_slices += isinstance(index, slice)
        return super().__getitem__(index)


def test_a_long_tag_is_compared_only_with_what_the_reasoning_can_hold():
    closing = Sliced([*range(10, 1000), 3])
    forced = forced_token(ThinkingLimit(2, OPEN, closing, closing), np.array([1, 5, 5], np.int32), 1)
    assert forced == 10
    assert closing.num_slices <= 3


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.5, "top_k": 3, "repetition_penalty": 2.0}])
def test_forced_tokens_are_sampled_whatever_else_is_asked(params):
    sampler = Sampler(20, make_sampling("torch"))
    asked = SamplingParams(bad_words=["x"], logit_bias={2: -100.0}, allowed_token_ids=[5, 6], min_tokens=5, **params)
    sampler.add(0, asked, 0, [3], [[2], [3]], limit(2))
    sampler.add(1, SamplingParams(temperature=0.0), 0)

    class Batch:
        token_ids = np.zeros((2, 20), np.int32)
        token_ids_SM = torch.as_tensor(token_ids)
        num_prompt = np.array([2, 2])

    batch = Batch()
    batch.token_ids[:, :2] = [7, 1]
    logits = torch.zeros(2, 20)
    logits[:, 6] = 1.0
    assert not sampler.is_plain_greedy(np.array([0]))
    for position in range(2, 8):
        sampled = sampler.sample(logits, np.array([0, 1]), np.array([position] * 2), batch)
        batch.token_ids[:, position] = sampled.token_ids_R
    assert batch.token_ids[0, 4:6].tolist() == CLOSE
    assert {*batch.token_ids[0, 2:4].tolist(), *batch.token_ids[0, 6:8].tolist()} <= {5, 6}
    assert batch.token_ids[1, 2:8].tolist() == [6] * 6


# ---- how a request and an engine say it


def limits(**options: Any) -> ThinkingLimits:
    return ThinkingLimits(resolve(demo_model_path(), **options), Tokenizer.from_dir(demo_model_path()))


def test_the_engine_knows_the_tags():
    encode = Tokenizer.from_dir(demo_model_path()).encode
    asked = SamplingParams(thinking_token_budget=5)
    expected = ThinkingLimit(5, encode("<think>", False), encode("</think>", False), encode("</think>", False))
    for options in ({"reasoning_config": {"reasoning_parser": "qwen3"}}, {"reasoning_parser": "qwen3"}):
        assert limits(**options).of(asked) == expected
    phrase = {"reasoning_parser": "qwen3", "reasoning_end_str": "So:</think>"}
    assert limits(reasoning_config=phrase).of(asked).forced == encode("So:</think>", False)
    own = limits(reasoning_config='{"reasoning_start_str": "[", "reasoning_end_str": "]"}').of(asked)
    assert (own.opening, own.closing, own.forced) == (encode("[", False), encode("]", False), encode("]", False))
    tags = ReasoningTags("[", "]", is_open=True)
    given_by_request = SamplingParams(thinking_token_budget=5, reasoning_tags=tags)
    assert limits().of(given_by_request) == ThinkingLimit(5, own.opening, own.closing, own.closing, True)


def test_without_tags_a_budget_is_refused_by_name():
    for options in ({}, {"reasoning_parser": "unknown"}):
        with pytest.raises(InvalidRequest, match=r"thinking_token_budget=5 needs the tags.*reasoning_config"):
            limits(**options).of(SamplingParams(thinking_token_budget=5))
    assert limits().of(SamplingParams(thinking_token_budget=-1)) is None
    with pytest.raises(InvalidRequest, match="thinking_token_budget=-2"):
        SamplingParams(thinking_token_budget=-2)


@pytest.mark.parametrize(
    ("given_config", "message"),
    [
        ({"reasoning_parser": "granite"}, "reasoning_parser='granite' isn't one of deepseek_r1"),
        ({"reasoning_start_str": "["}, "doesn't say how reasoning begins and ends"),
        ({"start": "["}, "unknown setting 'start'"),
    ],
)
def test_a_config_that_names_no_tags_is_refused(given_config, message):
    with pytest.raises(InvalidConfig, match=message):
        resolve(demo_model_path(), reasoning_config=given_config)


def test_each_parser_has_the_same_tags_everywhere():
    assert {name: tags_of(parser) for name, parser in PARSERS.items()} == TAGS
    assert make_config().reasoning_config is None
