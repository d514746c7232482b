"""A plan gives the tokens that the formulas give, however the work is cut into steps, slots and blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from native_kernels import needs_kernels
from small_model import (
    BLOCK_SIZE,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    SPEC,
    int32,
    make_runner,
    new_request,
    plan,
    reference_logits,
    reference_tokens,
    tokens_of,
)

from raycore.kernels import Backend
from raycore.messages import StepPlan, StepTokens
from raycore.runner.runner import ModelRunner
from raycore.sampling.picking import most_likely
from raycore.sampling_params import SamplingParams

PROMPT = [5, 80, 33, 2, 61, 17, 90, 44, 44, 8, 71, 23, 12]
NUM_TOKENS = 6
BLOCKS = [9, 3, 40, 0, 22, 63]


@pytest.fixture(scope="module")
def expected() -> list[int]:
    return reference_tokens(PROMPT, NUM_TOKENS)


MakeRunner = Callable[..., ModelRunner]


RUNNERS: dict[str, dict[str, Any]] = {
    "torch": {},
    "native": {"backend": "native"},
    "memory of its own": {"is_shared": False},
}


@pytest.fixture(params=[pytest.param(each, marks=needs_kernels if each == "native" else ()) for each in RUNNERS])
def make(request: pytest.FixtureRequest) -> MakeRunner:
    return partial(make_runner, **RUNNERS[request.param])


def decode(runner: ModelRunner, slot: int, first: int, num_tokens: int) -> list[int]:
    tokens = [first]
    while len(tokens) < num_tokens:
        tokens += tokens_of(runner.execute(plan([slot])))
    return tokens


def test_a_whole_prompt_and_decodes_equal_the_formulas(make: MakeRunner, expected: list[int]) -> None:
    runner = make()
    first = runner.execute(plan([2], [len(PROMPT)], new_requests=[new_request(2, PROMPT, BLOCKS)]))
    assert decode(runner, 2, tokens_of(first)[0], NUM_TOKENS) == expected


def test_a_step_is_launched_before_the_last_ones_tokens_are_known(make: MakeRunner, expected: list[int]) -> None:
    runner = make()
    steps = [runner.launch(plan([0], [len(PROMPT)], new_requests=[new_request(0, PROMPT, BLOCKS)]))]
    steps += [runner.launch(plan([0])) for _ in range(NUM_TOKENS - 1)]
    assert [tokens_of(step.result())[0] for step in steps] == expected


def test_a_runner_that_has_not_sampled_takes_the_tokens_from_the_plan(make: MakeRunner, expected: list[int]) -> None:
    runner, length = make(), len(PROMPT)
    told = StepTokens(int32([0]), int32([0]), int32(PROMPT[:-1]))
    runner.execute(plan([0], [length - 1], new_requests=[new_request(0, PROMPT, BLOCKS)], tokens=told))
    for number, token in enumerate([PROMPT[-1], *expected[:-1]]):
        told = StepTokens(int32([length - 1 + number]), int32([1]), int32([token]))
        assert tokens_of(runner.execute(plan([0], tokens=told))) == expected[number : number + 1]


@pytest.mark.parametrize("num_right", range(4))
def test_right_drafts_are_kept_and_wrong_ones_leave_no_trace(
    make: MakeRunner, expected: list[int], num_right: int
) -> None:
    runner, length = make(), len(PROMPT)
    first = runner.execute(plan([0], [length], new_requests=[new_request(0, PROMPT, BLOCKS)]))
    drafts = [token if offset < num_right else (token + 1) % 97 for offset, token in enumerate(expected[1:4])]
    told = StepTokens(int32([length]), int32([4]), int32(tokens_of(first) + drafts))
    result = runner.execute(plan([0], [4], tokens=told))
    assert np.frombuffer(result.num_tokens, np.int32).tolist() == [num_right + 1]
    # the next step has no drafts, and isn't told the tokens
    *before, last = tokens_of(first) + tokens_of(result)
    assert before + decode(runner, 0, last, NUM_TOKENS - len(before)) == expected


def test_log_probabilities_come_only_with_accepted_tokens(make: MakeRunner, expected: list[int]) -> None:
    params = SamplingParams(temperature=0.0, logprobs=1)
    runner, length = make(), len(PROMPT)
    request = new_request(0, PROMPT, BLOCKS, params=params)
    runner.execute(plan([0], [length], new_requests=[request]))
    told = StepTokens(int32([length]), int32([4]), int32([*expected[:3], 96]))
    result = runner.execute(plan([0], [4], tokens=told))
    assert tokens_of(result) == expected[1:4]
    assert [(index, entry.token_ids[0]) for index, entry in result.logprobs] == [(0, token) for token in expected[1:4]]


def test_a_late_token_is_not_given_to_the_next_request_of_its_slot(make: MakeRunner) -> None:
    """A slot changes hands while its last token is in flight. Penalties read the new request's tokens."""
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    other = PROMPT[::-1] * 2
    alone = make()
    first = alone.execute(plan([0], [len(other)], new_requests=[new_request(0, other, range(12), params=params)]))
    expected = decode(alone, 0, tokens_of(first)[0], NUM_TOKENS)
    runner = make()
    late = runner.launch(plan([0], [len(PROMPT)], new_requests=[new_request(0, PROMPT, BLOCKS)]))
    request = new_request(0, other, range(30, 42), params=params)
    first = runner.launch(plan([0], [len(other)], freed_slots=[0], new_requests=[request]))
    late.result()
    assert decode(runner, 0, tokens_of(first.result())[0], NUM_TOKENS) == expected


@pytest.mark.parametrize("chunks", [[1, 12], [4, 4, 5], [11, 1, 1], [6, 7]])
def test_a_prompt_in_chunks_samples_only_at_its_end(make: MakeRunner, chunks: list[int], expected: list[int]) -> None:
    runner = make()
    request = [new_request(0, PROMPT, BLOCKS)]
    tokens: list[list[int]] = []
    for count in chunks:
        tokens.append(tokens_of(runner.execute(plan([0], [count], new_requests=request))))
        request = []
    assert tokens[:-1] == [[]] * (len(chunks) - 1)
    assert decode(runner, 0, tokens[-1][0], NUM_TOKENS) == expected


def test_a_cached_prefix_is_not_computed_again(make: MakeRunner, expected: list[int]) -> None:
    runner = make()
    runner.execute(plan([1], [len(PROMPT)], new_requests=[new_request(1, PROMPT, BLOCKS)]))
    shared = [*BLOCKS[:2], 50, 51, 52]
    request = new_request(4, PROMPT, shared, num_computed=2 * BLOCK_SIZE)
    first = runner.execute(plan([4], [len(PROMPT) - 2 * BLOCK_SIZE], new_requests=[request]))
    assert decode(runner, 4, tokens_of(first)[0], NUM_TOKENS) == expected


def test_a_preempted_request_continues_in_another_slot_with_other_blocks(make: MakeRunner, expected: list[int]) -> None:
    runner = make()
    first = runner.execute(plan([0], [len(PROMPT)], new_requests=[new_request(0, PROMPT, BLOCKS)]))
    tokens = decode(runner, 0, tokens_of(first)[0], 3)
    resumed = new_request(5, PROMPT + tokens, [33, 34, 35, 36, 37, 38])
    resumed.num_prompt_tokens = len(PROMPT)
    again = runner.execute(plan([5], [len(PROMPT) + 3], freed_slots=[0], new_requests=[resumed]))
    assert tokens + decode(runner, 5, tokens_of(again)[0], 3) == expected


def test_a_sequence_grows_by_new_blocks_when_it_needs_them(make: MakeRunner, expected: list[int]) -> None:
    runner = make()
    first = runner.execute(plan([0], [len(PROMPT)], new_requests=[new_request(0, PROMPT, BLOCKS[:4])]))
    tokens = tokens_of(first)
    for index in range(NUM_TOKENS - 1):
        needs_block = (len(PROMPT) + index) % BLOCK_SIZE == 0
        new = {"new_block_slots": np.int32(0).tobytes(), "new_block_ids": np.int32(55).tobytes()} if needs_block else {}
        tokens += tokens_of(runner.execute(plan([0], **new)))
    assert tokens == expected


def test_requests_of_all_kinds_share_a_step(make: MakeRunner) -> None:
    """Two decodes, two equal whole prompts, a later chunk, and a short prompt, each with its own result."""
    prompts = [PROMPT, PROMPT[:5], PROMPT[3:9], PROMPT[4:10], PROMPT[::-1], [7]]
    blocks = [list(range(start, start + 6)) for start in range(0, 36, 6)]
    requests = [new_request(slot, prompts[slot], blocks[slot]) for slot in range(6)]
    runner = make()
    before = runner.execute(plan([0, 1, 4], [13, 5, 3], new_requests=[requests[0], requests[1], requests[4]]))
    mixed = runner.execute(
        plan([1, 0, 2, 3, 4, 5], [1, 1, 6, 6, 10, 1], new_requests=[requests[2], requests[3], requests[5]])
    )
    after = runner.execute(plan([5, 3, 1, 0, 2, 4]))
    tokens = {slot: [token] for slot, token in zip([0, 1], tokens_of(before)[:2], strict=True)}
    for slots, result in (([1, 0, 2, 3, 4, 5], mixed), ([5, 3, 1, 0, 2, 4], after)):
        for slot, token in zip(slots, tokens_of(result), strict=True):
            tokens.setdefault(slot, []).append(token)
    assert tokens == {slot: reference_tokens(prompts[slot], len(tokens[slot])) for slot in range(6)}


def test_decodes_that_exceed_the_scratch_memory_are_computed_in_groups(make: MakeRunner) -> None:
    """They go through attention in groups by length, and come back in their own order."""
    lengths = [20, 80, 3, 41, 60, 9]
    prompts = [[(7 * slot + 5 * index) % 97 for index in range(length)] for slot, length in enumerate(lengths)]
    ends = np.cumsum([-(-(length + 4) // BLOCK_SIZE) for length in lengths]).tolist()
    blocks = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    requests = [new_request(slot, prompts[slot], blocks[slot]) for slot in range(6)]
    runner = make(max_gathered=1)
    tokens = [tokens_of(runner.execute(plan(range(6), lengths, new_requests=requests)))]
    tokens += [tokens_of(runner.execute(plan(range(6)))) for _ in range(3)]
    together = make(max_gathered=6)
    expected = [tokens_of(together.execute(plan(range(6), lengths, new_requests=requests)))]
    expected += [tokens_of(together.execute(plan(range(6)))) for _ in range(3)]
    assert tokens == expected
    assert [step[1] for step in tokens] == reference_tokens(prompts[1], 4)


def test_prompt_logprobs_cover_every_chunk_but_the_first_token(make: MakeRunner) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=1)
    runner = make()
    request = new_request(3, PROMPT, BLOCKS, params=params)
    first = runner.execute(plan([3], [6], new_requests=[request]))
    second = runner.execute(plan([3], [7]))
    assert [(index, position, len(entries)) for index, position, entries in first.prompt_logprobs] == [(0, 1, 6)]
    assert [(index, position, len(entries)) for index, position, entries in second.prompt_logprobs] == [(0, 7, 6)]
    entries = first.prompt_logprobs[0][2] + second.prompt_logprobs[0][2]
    expected_TV = reference_logits(PROMPT).log_softmax(-1)
    for position, entry in enumerate(entries, start=1):
        assert entry.token_ids[0] == PROMPT[position]
        assert entry.logprobs[0] == pytest.approx(float(expected_TV[position - 1, PROMPT[position]]), abs=1e-4)
    [(index, sampled)] = second.logprobs
    assert (index, sampled.token_ids[0]) == (0, tokens_of(second)[0])


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=needs_kernels)])
@pytest.mark.parametrize(
    "parts", [{"attention_softcap": 0.4}, {"sinks": True}, {"logits_softcap": 0.6}], ids=lambda parts: next(iter(parts))
)
def test_a_model_with_caps_and_sinks_equals_the_formulas(
    parts: dict[str, Any], backend: Backend, batch_invariant: bool
) -> None:
    spec = msgspec.structs.replace(SPEC, **parts)
    expected_TV = reference_logits(PROMPT, spec).log_softmax(-1)
    assert not torch.allclose(expected_TV, reference_logits(PROMPT).log_softmax(-1), atol=1e-2)
    runner = make_runner(spec, backend=backend, batch_invariant=batch_invariant)
    request = new_request(3, PROMPT, BLOCKS, params=SamplingParams(temperature=0.0, prompt_logprobs=2))
    first = runner.execute(plan([3], [6], new_requests=[request]))
    second = runner.execute(plan([3], [7]))
    entries = first.prompt_logprobs[0][2] + second.prompt_logprobs[0][2]
    for position, entry in enumerate(entries, start=1):
        assert entry.logprobs[0] == pytest.approx(float(expected_TV[position - 1, PROMPT[position]]), abs=1e-4)
    assert decode(runner, 3, tokens_of(second)[0], NUM_TOKENS) == reference_tokens(PROMPT, NUM_TOKENS, spec)


def test_a_sequence_may_fill_the_models_length(make: MakeRunner) -> None:
    runner = make()
    prompt = [3] * (MAX_MODEL_LEN - 1)
    request = new_request(0, prompt, list(range(NUM_BLOCKS))[: MAX_MODEL_LEN // BLOCK_SIZE])
    runner.execute(plan([0], [len(prompt)], new_requests=[request]))
    assert 0 <= tokens_of(runner.execute(plan([0])))[0] < SPEC.vocab_size


def test_a_plan_without_slots_frees_slots_and_samples_no_token(make: MakeRunner) -> None:
    runner = make()
    runner.execute(plan([0], [3], new_requests=[new_request(0, PROMPT[:3], BLOCKS)]))
    assert tokens_of(runner.execute(StepPlan(7, freed_slots=[0]))) == []


def test_a_plan_beyond_the_known_tokens_is_refused(make: MakeRunner) -> None:
    runner = make()
    with pytest.raises(AssertionError, match="beyond"):
        runner.execute(plan([0], [4], new_requests=[new_request(0, PROMPT[:3], BLOCKS)]))


def test_most_likely_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, -1.0, 5.0]])
    assert most_likely(logits).tolist() == most_likely(logits.to(torch.bfloat16)).tolist() == [1, 0]
