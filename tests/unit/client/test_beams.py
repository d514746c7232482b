"""Beam search over a model that is a table of log probabilities, beside the search of all sequences."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from raycore.beam_search import BeamSearchParams
from raycore.client.ask import Ask
from raycore.client.beams import BeamSearch
from raycore.client.inputs import ParsedPrompt
from raycore.demo import demo_model_path
from raycore.errors import InvalidRequest
from raycore.lora.request import LoRARequest
from raycore.outputs import CompletionOutput, Logprob, RequestOutput
from raycore.text.tokenizer import Tokenizer

PROMPT, EOS, VOCABULARY = [7, 3], 0, 5
ADAPTER = LoRARequest("a", 1, "/a")
TOKENIZER = Tokenizer.from_dir(demo_model_path())


def table(tokens: list[int]) -> list[float]:
    """The log probabilities of the next token: random ones that depend on all tokens."""
    weights = [random.Random(f"{tokens} {token}").expovariate(1) + 1e-3 for token in range(VOCABULARY)]
    return [math.log(weight / sum(weights)) for weight in weights]


def answer(prompt: ParsedPrompt, num_logprobs: int, reason: str = "length") -> RequestOutput:
    logprobs = table(prompt.token_ids)
    ranked = sorted(range(VOCABULARY), key=lambda token: -logprobs[token])[:num_logprobs]
    position = {token: Logprob(logprobs[token], rank) for rank, token in enumerate(ranked, start=1)}
    output = CompletionOutput(0, "", [ranked[0]], logprobs=[position], finish_reason=reason)
    return RequestOutput("x", None, prompt.token_ids, outputs=[output], finished=True)


def asked(prompt: ParsedPrompt, **params: Any) -> Ask:
    return Ask(prompt, BeamSearchParams(**params), "id", priority=3, stream=True, lora=ADAPTER)


def search(max_model_len: int = 100, prompt: list[int] = PROMPT, **params: Any) -> tuple[BeamSearch, int]:
    """A finished search, and the number of its steps."""
    made = BeamSearch(asked(ParsedPrompt(None, prompt), **params), [EOS], VOCABULARY, max_model_len)
    num_steps = 0
    while made.asks:
        num_logprobs = made.step_params.logprobs
        assert num_logprobs is not None
        made.take([answer(each.parsed, num_logprobs) for each in made.asks])
        num_steps += 1
    return made, num_steps


def best(num_tokens: int, *, ignores_eos: bool, penalty: float) -> list[tuple[list[int], float]]:
    """All sequences of up to `num_tokens`, the best first, each with its log probability."""
    found: list[tuple[float, list[int], float]] = []
    for length in range(1, num_tokens + 1):
        for output in itertools.product(range(VOCABULARY), repeat=length):
            has_ended = output[-1] == EOS and not ignores_eos
            if (EOS in output[:-1] and not ignores_eos) or (not has_ended and length < num_tokens):
                continue
            total = sum(table([*PROMPT, *output[:index]])[token] for index, token in enumerate(output))
            score = total / (len(PROMPT) + length - has_ended) ** penalty
            found.append((score, [*PROMPT, *output], total))
    return [(tokens, total) for _, tokens, total in sorted(found, reverse=True)]


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize("ignores_eos", [False, True])
def test_beams_that_miss_nothing_find_the_best_of_all_sequences(penalty: float, ignores_eos: bool) -> None:
    made, _ = search(beam_width=500, max_tokens=4, length_penalty=penalty, ignore_eos=ignores_eos)
    expected = best(4, ignores_eos=ignores_eos, penalty=penalty)[:500]
    found = made.sequences(TOKENIZER)
    assert [each.tokens for each in found] == [tokens for tokens, _ in expected]
    assert [each.cum_logprob for each in found] == pytest.approx([total for _, total in expected])
    for each in found:
        has_ended = each.tokens[-1] == EOS and not ignores_eos
        assert (each.finish_reason, each.stop_reason) == (("stop", EOS) if has_ended else ("length", None))
        assert len(each.logprobs) == len(each.tokens) - len(PROMPT)
        assert each.text == TOKENIZER.decode(each.tokens)


def plain(width: int, num_tokens: int, penalty: float) -> list[list[int]]:
    """The same search without an early end, as simple as possible."""
    beams, done = [(0.0, list(PROMPT))], []
    for _ in range(num_tokens):
        found = []
        for total, tokens in beams:
            ranked = sorted(enumerate(table(tokens)), key=lambda item: -item[1])[: 2 * width]
            found += [(total + logprob, [*tokens, token]) for token, logprob in ranked]
        done += [each for each in found if each[1][-1] == EOS]
        beams = sorted((each for each in found if each[1][-1] != EOS), key=lambda each: -each[0])[:width]
    ranked = sorted([*done, *beams], key=lambda each: -each[0] / (len(each[1]) - (each[1][-1] == EOS)) ** penalty)
    return [tokens for _, tokens in sorted(ranked, key=lambda each: -each[0] / _length(each[1]) ** penalty)][:width]


def _length(tokens: list[int]) -> int:
    return len(tokens) - (tokens[-1] == EOS)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 0.3, -0.5])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_search_ends_early_only_if_nothing_better_can_come(width: int, penalty: float) -> None:
    made, num_steps = search(beam_width=width, max_tokens=40, length_penalty=penalty)
    assert [each.tokens for each in made.sequences(TOKENIZER)] == plain(width, 40, penalty)
    if penalty <= 0:
        assert num_steps < 40


def test_one_beam_is_greedy() -> None:
    (found,) = search(beam_width=1, max_tokens=6, ignore_eos=True)[0].sequences(TOKENIZER)
    tokens = list(PROMPT)
    for _ in range(6):
        tokens.append(max(range(VOCABULARY), key=table(tokens).__getitem__))
    assert found.tokens == tokens


def test_outputs_have_no_prompt_and_the_end_of_sequence_only_if_asked() -> None:
    for included in (False, True):
        made, _ = search(beam_width=4, max_tokens=4, include_stop_str_in_output=included)
        output = made.output(TOKENIZER)
        assert (output.request_id, output.prompt_token_ids, output.finished) == ("id", PROMPT, True)
        assert [each.index for each in output.outputs] == [0, 1, 2, 3]
        assert {each.finish_reason for each in output.outputs} == {"stop", "length"}
        for each, sequence in zip(output.outputs, made.sequences(TOKENIZER), strict=True):
            end = len(sequence.tokens) - (each.finish_reason == "stop" and not included)
            assert each.token_ids == sequence.tokens[len(PROMPT) : end]
            assert each.text == TOKENIZER.decode(each.token_ids)
            assert each.logprobs is not None
            assert len(each.logprobs) == len(each.token_ids)
            assert each.cumulative_logprob == sequence.cum_logprob


def test_sequences_are_as_long_as_the_model_allows() -> None:
    found = search(8, beam_width=2, max_tokens=100, ignore_eos=True)[0].sequences(TOKENIZER)
    assert [len(each.tokens) for each in found] == [8, 8]


def test_an_aborted_request_ends_the_search() -> None:
    made = BeamSearch(asked(ParsedPrompt(None, PROMPT), beam_width=2, max_tokens=5), [EOS], VOCABULARY, 100)
    made.take([answer(each.parsed, 4) for each in made.asks])
    made.take([answer(each.parsed, 4, "abort" if index else "length") for index, each in enumerate(made.asks)])
    assert not made.asks
    assert "abort" in {each.finish_reason for each in made.sequences(TOKENIZER)}


def test_requests_keep_what_the_prompt_has() -> None:
    prompt = ParsedPrompt("text", PROMPT, cache_salt="salt", has_unknown_tokens=True)
    made = BeamSearch(asked(prompt, beam_width=2, max_tokens=5), [EOS], 200_000, 100)
    assert made.step_params.logprobs == 4
    made.take([answer(each.parsed, 4) for each in made.asks])
    assert [each.parsed.cache_salt for each in made.asks] == ["salt", "salt"]
    assert all(each.parsed.token_ids[:2] == PROMPT and len(each.parsed.token_ids) == 3 for each in made.asks)
    assert [each.request_id for each in made.asks] == ["id-1-0", "id-1-1"]
    assert all((each.priority, each.lora, each.stream) == (3, ADAPTER, False) for each in made.asks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width=0 isn't in"),
        ({"beam_width": 2.5}, "beam_width=2.5 isn't an integer"),
        ({"beam_width": 5000}, "beam_width=5000 isn't in"),
        ({"max_tokens": 0}, "max_tokens=0 isn't at least 1"),
        ({"max_tokens": None}, "max_tokens=None isn't an integer"),
        ({"temperature": -1}, "temperature=-1 is negative"),
        ({"length_penalty": math.nan}, "length_penalty=nan isn't a number"),
        ({"length_penalty": "1"}, "length_penalty='1' isn't a number"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs can't be used"),
    ],
)
def test_parameters_that_cannot_work_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        BeamSearchParams(**({"beam_width": 2, "max_tokens": 5} | fields))
