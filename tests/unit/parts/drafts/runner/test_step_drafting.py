"""Steps that are planned before it is known which drafts were right: their workers draft, and the tokens stay right."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pytest
from drafting_runners import MAX_DRAFT, RUNNERS, DraftModelRunner, Eagle3Runner
from small_model import SPEC, int32, make_runner, new_request, plan, reference_tokens, tokens_of

from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.from_tokens import guesses_from_tokens
from raycore.parts.drafts.runner.token_guesses import TokenGuesses
from raycore.runner.launched_step import LaunchedStep
from raycore.runner.runner import ModelRunner

PROMPTS = [[5, 80, 33, 2, 61, 17, 5, 80, 33], [8, 71, 23], [12, 5, 9, 30, 12, 5, 9]]
NUM_STEPS = 4


def from_tokens(method: str, options: dict[str, Any]) -> ModelRunner:
    config = SpeculativeConfig(method, MAX_DRAFT, prompt_lookup_min=1, prompt_lookup_max=3)
    make = lambda target, batch, *_: TokenGuesses(guesses_from_tokens(config, perf_counter), batch)  # noqa: E731
    return make_runner(make_drafter=make, **options)


def make(method: str, path: Path, options: dict[str, Any]) -> ModelRunner:
    if method == "draft_model":
        return DraftModelRunner(**options).sequences._runner
    if method == "target":
        return DraftModelRunner(SPEC, **options).sequences._runner
    if method == "eagle3":
        return Eagle3Runner(path / "head", {}, **options).sequences._runner
    return from_tokens(method, options)


@pytest.mark.parametrize("method", ["draft_model", "target", "eagle3", "ngram", "suffix"])
@pytest.mark.parametrize("options", RUNNERS.values(), ids=RUNNERS)
def test_drafts_of_steps_in_flight_change_no_token(tmp_path: Path, options: dict[str, Any], method: str) -> None:
    """Results are taken two steps later, and one slot changes hands meanwhile."""
    runner = make(method, tmp_path, options)
    owners = {0: 0, 1: 1, 2: 2}
    prompts = dict(enumerate(PROMPTS))
    tokens: dict[int, list[int]] = {owner: [] for owner in prompts}
    num_drafts = num_right = 0
    in_flight: deque[tuple[dict[int, int], LaunchedStep]] = deque()

    def take() -> None:
        nonlocal num_drafts, num_right
        of_slots, launched = in_flight.popleft()
        result, slots = launched.result(), list(of_slots)
        counts = np.frombuffer(result.num_tokens, np.int32).tolist() or [1] * len(slots)
        drafts = np.frombuffer(result.num_drafts, np.int32).tolist() or [0] * len(slots)
        new = tokens_of(result)
        for slot, count, most in zip(slots, counts, drafts, strict=True):
            assert count <= 1 + most
            tokens[of_slots[slot]] += new[:count]
            del new[:count]
            num_drafts, num_right = num_drafts + most, num_right + count - 1

    def launch(slots: list[int], *args: Any, **fields: Any) -> None:
        in_flight.append(({slot: owners[slot] for slot in slots}, runner.launch(plan(slots, *args, **fields))))
        if len(in_flight) > 2:
            take()

    blocks = [range(16 * slot, 16 * slot + 16) for slot in range(4)]
    requests = [new_request(slot, prompt, blocks[slot]) for slot, prompt in prompts.items()]
    launch([0, 1, 2], [len(prompt) for prompt in PROMPTS], new_requests=requests)
    for number in range(NUM_STEPS):
        launch([0, 1, 2], max_drafts=int32([MAX_DRAFT, number % 3, 2]))
    owners[1], prompts[3], tokens[3] = 3, PROMPTS[0][:6], []
    heir = new_request(1, prompts[3], blocks[3])
    launch([0, 2, 1], [1, 1, 6], freed_slots=[1], new_requests=[heir], max_drafts=int32([1, 3, 0]))
    launch([0, 1, 2])
    for _ in range(3):
        launch([0, 1, 2], max_drafts=int32([MAX_DRAFT, 1, 1]))
    while in_flight:
        take()
    for owner, prompt in prompts.items():
        assert tokens[owner] == reference_tokens(prompt, len(tokens[owner]))
    assert num_drafts > 0
    if method == "target":
        assert num_right == num_drafts > 30
