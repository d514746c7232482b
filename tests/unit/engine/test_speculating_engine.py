"""Drafts change no output: whatever requests ask for, however many drafts are right, and whoever is preempted."""

from __future__ import annotations

import random
from copy import deepcopy
from typing import Any

import pytest
from mixed_requests import TOKENS, make_requests, run
from number_formats import REPEATABLE

from raycore.engine import scheduling
from raycore.parts.drafts import worker
from raycore.parts.drafts.guesses.drafts import Drafts
from raycore.parts.drafts.scheduler.speculation import Speculation

LIMITS = {"max_num_seqs": 12, "max_num_batched_tokens": 96, "block_size": 8}
ABORTED_AT = {3: 5, 11: 1, 17: 9, 24: 2}
MAX_DRAFTS = 5
VOCAB = 320


class Prophet(Speculation):
    """Drafts what the outputs are known to be, with a wrong token in most drafts. Wrong tokens may break any rule."""

    expected: dict[int, dict[str, Any]]

    def propose(self, slots, running, limits, budget, num_other):
        rng = random.Random(self._num_steps)
        drafts: dict[int, list[int]] = {}
        for slot, limit in zip(slots.tolist(), limits.tolist(), strict=True):
            length = min(limit, budget, rng.randint(0, MAX_DRAFTS))
            tokens = self._next_tokens(slot, running)[: max(0, length)]
            if rng.random() < 0.7 and tokens:
                tokens[rng.randrange(len(tokens))] = rng.randrange(VOCAB)
            if tokens:
                drafts[slot] = tokens
                budget -= len(tokens)
        return Drafts.of(list(drafts), list(drafts.values()))

    def _next_tokens(self, slot: int, running) -> list[int]:
        seq_id = int(running.seq_id[slot])
        num_output = int(running.received[slot]) - len(make_requests()[seq_id].prompt_token_ids)
        return self.expected[seq_id]["tokens"][num_output:]


@pytest.fixture(params=REPEATABLE)
def options(request) -> dict[str, Any]:
    return LIMITS | request.param


@pytest.mark.parametrize("blocks", [200, 12], ids=["enough blocks", "preemptions"])
def test_outputs_with_drafts_equal_those_without_drafts(monkeypatch, options, blocks):
    options["num_gpu_blocks_override"] = blocks
    expected, _ = run({}, **options)
    monkeypatch.setattr(scheduling, "Speculation", Prophet)
    monkeypatch.setattr(Prophet, "expected", deepcopy(expected), raising=False)
    speculative_config = {"method": "ngram", "num_speculative_tokens": MAX_DRAFTS}
    found, load = run(ABORTED_AT, speculative_config=speculative_config, **options)
    assert (load.num_preemptions > 0) == (blocks == 12)
    check(found, expected)
    num_accepted, num_drafted = sum(load.drafts.accepted_per_position), load.drafts.num_draft_tokens
    assert num_drafted > 200
    assert 0.2 * num_drafted < num_accepted < 0.9 * num_drafted
    assert load.drafts.accepted_per_position[-1] > 0


class WorkersProphet:
    """Guesses of workers: what the outputs are known to be, with a wrong token in most. Implements `GuessSource`."""

    drafting_s = prompts_s = 0.0

    def __init__(self, expected: dict[int, dict[str, Any]]) -> None:
        self._rng = random.Random(3)
        self._outputs = {
            tuple(request.prompt_token_ids): expected[request.seq_id]["tokens"] for request in make_requests()
        }

    def guess(self, slots, running, limits, choose_lengths):
        drafts = {slot: self._guess(running.tokens[slot, : running.received[slot]].tolist()) for slot in slots.tolist()}
        found = {slot: draft for slot, draft in drafts.items() if draft}
        return Drafts.of(list(found), list(found.values()))

    def _guess(self, tokens: list[int]) -> list[int]:
        prompt = next(prompt for prompt in self._outputs if tuple(tokens[: len(prompt)]) == prompt)
        guess = self._outputs[prompt][len(tokens) - len(prompt) :][: self._rng.randint(0, MAX_DRAFTS)]
        if guess and self._rng.random() < 0.7:
            guess[self._rng.randrange(len(guess))] = self._rng.randrange(VOCAB)
        return guess

    def forget(self, slot: int, num_prompt_tokens: int) -> None:
        """Nothing is kept."""


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("blocks", [200, 12], ids=["enough blocks", "preemptions"])
def test_outputs_with_drafts_of_workers_in_several_steps_equal_those_without(monkeypatch, options, blocks, depth):
    options["num_gpu_blocks_override"] = blocks
    expected, _ = run({}, **options)
    monkeypatch.setattr(worker, "guesses_from_tokens", lambda *_: WorkersProphet(deepcopy(expected)))
    config = {"method": "ngram", "num_speculative_tokens": MAX_DRAFTS}
    config["num_speculative_tokens_per_batch_size"] = [(1, LIMITS["max_num_seqs"], MAX_DRAFTS)]
    found, load = run(ABORTED_AT, speculative_config=config, max_concurrent_batches=depth, **options)
    assert (load.num_preemptions > 0) == (blocks == 12)
    check(found, expected)
    num_accepted, num_drafted = sum(load.drafts.accepted_per_position), load.drafts.num_draft_tokens
    assert num_drafted > 200
    assert 0.2 * num_drafted < num_accepted < 0.9 * num_drafted


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_ngram_and_suffix_guesses_change_no_output(options, method, depth):
    """The kinds with penalties and biases repeat themselves little, greedy ones a lot."""
    expected, _ = run({}, **options)
    options["max_concurrent_batches"] = depth
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
    config["num_speculative_tokens_per_batch_size"] = [(1, LIMITS["max_num_seqs"], 4)]
    if method == "ngram":
        config |= {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    found, load = run({}, speculative_config=config, **options)
    check(found, expected)
    assert load.drafts.num_drafts > 0
    assert sum(load.drafts.accepted_per_position) > 0


def check(found: dict[int, Any], expected: dict[int, Any]) -> None:
    for seq_id, output in found.items():
        reference = deepcopy(expected[seq_id])
        if output["end"] is None:
            assert len(output["tokens"]) in range(ABORTED_AT[seq_id], ABORTED_AT[seq_id] + MAX_DRAFTS + 1)
            assert output["tokens"] == reference["tokens"][: len(output["tokens"])]
        else:
            assert output.pop("values") == pytest.approx(reference.pop("values"), abs=1e-3)
            assert output == reference, TOKENS.decode(output["tokens"])
    assert {output["end"][0] for output in expected.values()} == {"stop", "length"}
