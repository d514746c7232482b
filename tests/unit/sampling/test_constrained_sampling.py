"""What the sampler does with `structured_outputs`, beside everything else that it does."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_model import make_sampling

from raycore.demo import demo_model_path
from raycore.messages import ThinkingLimit
from raycore.parts.constraints.grammar.compiler import GrammarCompiler
from raycore.sampling import sampler
from raycore.sampling.sampler import SampledTokens, Sampler
from raycore.sampling_params import SamplingParams
from raycore.structured_outputs import StructuredOutputsParams
from raycore.text.tokenizer import Tokenizer

VOCAB = 320
EOS = 0
NUM_SLOTS = 8
LENGTH = 128
TOKENS = Tokenizer.from_dir(demo_model_path())


class Requests:
    """A sampler and its batch. The logits of a slot's position are random, but always the same."""

    def __init__(self, batch_invariant: bool = False) -> None:
        grammars = GrammarCompiler(demo_model_path(), VOCAB, [EOS])
        kernels = make_sampling(batch_invariant=batch_invariant)
        self.sampler = Sampler(VOCAB, kernels, grammars=grammars)
        token_ids = np.zeros((NUM_SLOTS, LENGTH), np.int32)
        self.batch = SimpleNamespace(
            token_ids=token_ids, token_ids_SM=torch.as_tensor(token_ids), num_prompt=np.full(NUM_SLOTS, 2, np.int64)
        )
        self.known = np.zeros(NUM_SLOTS, np.int64)
        self.seeds = np.zeros(NUM_SLOTS, np.int64)

    def add(self, slot: int, seed: int = 0, output=(), bad_words=(), thinking=None, **params) -> None:
        self.seeds[slot], self.known[slot] = seed, 2 + len(output)
        self.batch.token_ids[slot, 2 : 2 + len(output)] = output
        if "regex" in params:
            params["structured_outputs"] = StructuredOutputsParams(regex=params.pop("regex"))
        params = SamplingParams(**{"temperature": 1.5, "max_tokens": 100, **params})
        self.sampler.add(slot, params, seed, [EOS], bad_words, thinking)

    def step(self, *slots: int) -> SampledTokens:
        positions = self.known[list(slots)]
        sampled = self._sample(slots, positions)
        self.batch.token_ids[list(slots), positions] = sampled.token_ids_R
        self.known[list(slots)] += 1
        return sampled

    def step_with_drafts(self, slot: int, drafts: list[int]) -> None:
        """Keep what is sampled up to the first wrong draft."""
        first = int(self.known[slot])
        self.batch.token_ids[slot, first : first + len(drafts)] = drafts
        sampled = self._sample([slot] * (len(drafts) + 1), first + np.arange(len(drafts) + 1))
        tokens = sampled.token_ids_R.tolist()
        num_right = sum(itertools.takewhile(bool, (a == b for a, b in zip(tokens, drafts, strict=False))))
        self.batch.token_ids[slot, first : first + num_right + 1] = tokens[: num_right + 1]
        self.known[slot] += num_right + 1
        for row, why in sampled.failed:
            assert row > num_right, why
            self.sampler.take_back_failure(slot)

    def _sample(self, slots: Sequence[int], positions: np.ndarray) -> SampledTokens:
        rows = [
            torch.randn(VOCAB, generator=torch.Generator().manual_seed(int(self.seeds[slot] * 1000 + position)))
            for slot, position in zip(slots, positions, strict=True)
        ]
        return self.sampler.sample(torch.stack(rows), np.array(slots), positions, self.batch)

    def output(self, slot: int) -> list[int]:
        return self.batch.token_ids[slot, 2 : self.known[slot]].tolist()

    def run(self, *slots: int, num_steps: int = LENGTH - 2) -> None:
        """Until each has its end-of-sequence."""
        for _ in range(num_steps):
            left = [slot for slot in slots if EOS not in self.output(slot)]
            if not left:
                return
            assert self.step(*left).failed == []


def text_of(requests: Requests, slot: int) -> str:
    return TOKENS.decode(requests.output(slot))


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_every_constrained_output_matches_its_regex(temperature):
    patterns = ["[a-z]{3}-[0-9]{2,40}", r"(yes|no|maybe)( really){0,3}\.", "(a|b)*a(a|b){12}", "é{2,9}[^a]{1,9}"]
    requests = Requests()
    for slot, pattern in enumerate(patterns):
        requests.add(slot, seed=slot, temperature=temperature, regex=pattern)
    requests.run(*range(len(patterns)))
    for slot, pattern in enumerate(patterns):
        assert re.fullmatch(pattern, text_of(requests, slot))


def test_an_unconstrained_request_is_sampled_as_without_constrained_neighbors():
    alone, together = Requests(), Requests()
    for requests in (alone, together):
        requests.add(0, seed=4, top_p=0.9)
    together.add(1, seed=5, regex="[a-z]{60}")
    for _ in range(40):
        alone.step(0)
        together.step(1, 0)
    assert together.output(0) == alone.output(0)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_constrained_output_is_the_same_alone_in_a_batch_and_after_a_break(batch_invariant):
    alone, crowd, broken = (Requests(batch_invariant) for _ in range(3))
    pattern = "([a-z]{3,9} ){12}"
    for requests in (alone, crowd, broken):
        requests.add(3, seed=9, regex=pattern, top_k=40)
    for slot in (0, 1):
        crowd.add(slot, seed=slot, regex="[0-9]+")
    for _ in range(30):
        crowd.step(0, 3, 1)
    crowd.run(3)
    alone.run(3)
    broken.run(3, num_steps=25)
    output = broken.output(3)
    broken.sampler.remove(3)
    broken.add(5, seed=9, regex=pattern, top_k=40, output=output)
    broken.run(5)
    assert re.fullmatch(pattern, text_of(alone, 3))
    assert alone.output(3) == crowd.output(3) == broken.output(5)


def test_other_sampling_rules_narrow_a_constraint():
    letters = [TOKENS.encode(letter)[0] for letter in "abc"]
    requests = Requests()
    requests.add(0, regex="[a-z]{30}", allowed_token_ids=letters)
    requests.add(1, seed=1, regex="[a-c]*", min_tokens=20, logit_bias={letters[0]: -100.0})
    requests.add(2, seed=2, regex="([a-c]x){20}", bad_words=[letters[1:2]])
    requests.run(0, 1, 2)
    assert re.fullmatch("[abc]{30}", text_of(requests, 0))
    assert re.fullmatch("[bc]{20,}", text_of(requests, 1))
    assert re.fullmatch("([ac]x){20}", text_of(requests, 2))


def test_a_constraint_wins_where_other_sampling_rules_would_leave_no_token():
    (digit,) = TOKENS.encode("7")
    requests = Requests()
    requests.add(0, regex="[a-z]{5}", allowed_token_ids=[digit])
    requests.add(1, seed=1, regex="7", min_tokens=4)
    requests.add(2, seed=2, regex="777", bad_words=[[digit]])
    requests.run(0, 1, 2)
    assert re.fullmatch("[a-z]{5}", text_of(requests, 0))
    assert requests.output(1) == [digit, EOS]
    assert requests.output(2) == [digit] * 3 + [EOS]
    requests.step(1)
    assert requests.output(1) == [digit, EOS, EOS], "after the end there is nothing else"


def test_stop_tokens_may_end_a_constrained_output():
    (stop,) = TOKENS.encode("x")
    requests = Requests()
    requests.add(0, regex="[0-9]{3}", stop_token_ids=[stop], logit_bias={stop: 100.0})
    for _ in range(6):
        requests.step(0)
    assert re.fullmatch("[0-9]{3}xxx", text_of(requests, 0))


def test_logprobs_of_constrained_tokens_are_those_of_the_model():
    requests = Requests()
    requests.add(0, seed=1, temperature=0.0, regex="[0-9]", logprobs=1)
    [(rows, download)] = requests.step(0).logprobs
    [row], [entry] = rows, download.entries()
    assert row == 0
    assert entry.token_ids[0] == requests.output(0)[0] != entry.token_ids[1]
    assert entry.rank > 1


def test_a_constraint_that_fails_ends_only_its_own_request():
    requests = Requests()
    requests.add(0, seed=1, regex="[a-z]{5}")
    requests.add(1, seed=2, regex="[a-z]{5}", output=TOKENS.encode("7"))
    requests.add(2, seed=3, regex="(")
    requests.add(3, seed=4, temperature=0.0)
    for _ in range(3):
        failed = dict(requests.step(3, 2, 1, 0).failed)
        assert failed.keys() == {1, 2}
        assert "unclosed group" in failed[1]
        assert "can't be enforced at token" in failed[2]
    requests.run(0)
    assert re.fullmatch("[a-z]{5}", text_of(requests, 0))
    requests.add(1, seed=2, regex="[a-z]{5}")
    requests.run(1)
    assert re.fullmatch("[a-z]{5}", text_of(requests, 1))


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 100])
def test_drafts_change_no_constrained_output(monkeypatch, rows_at_a_time):
    """Neither those that the constraint forbids, nor those that come after them. They may lie in another group of
    rows."""
    monkeypatch.setattr(sampler, "_LOGITS_AT_A_TIME", rows_at_a_time * VOCAB)
    kinds = [
        {"regex": "([a-z]{3,9} ){12}"},
        {"regex": "[a-c]{40}x", "min_tokens": 20, "repetition_penalty": 1.2},
        {"regex": "(ab?c){20}", "bad_words": [TOKENS.encode("b"), TOKENS.encode("a") + TOKENS.encode("c")]},
        {"bad_words": [TOKENS.encode("7") + TOKENS.encode("8")], "frequency_penalty": 0.5},
    ]
    plain, drafted = Requests(), Requests()
    for requests in (plain, drafted):
        for slot, kind in enumerate(kinds):
            requests.add(slot, seed=slot, **kind)
    for _ in range(40):
        plain.step(*range(len(kinds)))
    rng = random.Random(4)
    for slot in range(len(kinds)):
        while (num_known := len(drafted.output(slot))) < 40:
            drafts = plain.output(slot)[num_known : num_known + 3]
            drafts[rng.randrange(len(drafts))] = rng.randrange(VOCAB)
            drafted.step_with_drafts(slot, drafts)
        assert drafted.output(slot)[:40] == plain.output(slot)


def test_json_outputs_with_any_white_space_are_valid():
    requests = Requests()
    schema = {"type": "array", "items": {"type": "integer", "minimum": 3, "maximum": 99}, "minItems": 3, "maxItems": 3}
    for slot in range(NUM_SLOTS):
        requests.add(slot, seed=slot, structured_outputs=StructuredOutputsParams(json=schema))
    requests.run(*range(NUM_SLOTS))
    for slot in range(NUM_SLOTS):
        numbers = json.loads(text_of(requests, slot))
        assert len(numbers) == 3
        assert all(3 <= number <= 99 for number in numbers)


def test_a_constraint_begins_after_reasoning_that_was_ended():
    """Also with drafts, and in a request that starts again with a part of its output."""
    closing = TOKENS.encode("</think>", add_special_tokens=False)
    thinking = ThinkingLimit(12, [319], closing, closing, is_open=True)
    asked = {"structured_outputs": StructuredOutputsParams(regex="[0-9]{5}", after="</think>"), "thinking": thinking}
    plain, drafted, moved = Requests(), Requests(), Requests()
    for requests in (plain, drafted):
        requests.add(0, seed=3, bad_words=[[EOS]], **asked)
    plain.run(0, num_steps=40)
    output = plain.output(0)
    assert output[12 : 12 + len(closing)] == closing
    assert re.fullmatch("[0-9]{5}", TOKENS.decode(output[12 + len(closing) :]))
    while (num_known := len(drafted.output(0))) < len(output):
        drafts = output[num_known : num_known + 3]
        drafted.step_with_drafts(0, [EOS] if num_known % 3 == 0 else drafts)
    assert drafted.output(0)[: len(output)] == output
    for length in (5, 12, 13, 12 + len(closing), 12 + len(closing) + 2):
        moved.add(1, seed=3, output=output[:length], bad_words=[[EOS]], **asked)
        moved.run(1, num_steps=40)
        assert moved.output(1) == output
