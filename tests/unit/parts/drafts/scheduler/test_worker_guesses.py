"""Workers are asked for drafts while these pay, and now and then when they don't seem to."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from configs import SPEC

from raycore.parts.drafts.config.drafter import DrafterConfig
from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.scheduler.speculation import Speculation
from raycore.parts.drafts.scheduler.worker_guesses import WorkerGuesses

NUM_TOKENS = 4
MAX_MODEL_LEN = 1000
NUM_SLOTS = 3


@dataclass
class Running:
    """Requests whose tokens count up."""

    tokens: np.ndarray = field(default_factory=lambda: np.tile(np.arange(2000, dtype=np.int32), (NUM_SLOTS, 1)))
    received: np.ndarray = field(default_factory=lambda: np.full(NUM_SLOTS, 10))


class Workers:
    """Draft what will come, or something else, and take a while, as steps do."""

    def __init__(self, running: Running, token_s: float, *, are_right: bool) -> None:
        self.now_s = 0.0
        self.asked: list[tuple[list[int], list[int]]] = []
        self.are_right = are_right
        self.token_s = token_s
        self._running = running

    def take(self, slots: list[int], num_tokens: list[int]) -> list[list[int]]:
        self.asked.append((slots, num_tokens))
        self.now_s += max(num_tokens) * self.token_s
        firsts = self._running.received[slots].tolist()
        offset = 0 if self.are_right else 7
        return [
            list(range(first + offset, first + offset + num)) for first, num in zip(firsts, num_tokens, strict=True)
        ]


def make(token_s: float, *, are_right: bool) -> tuple[Speculation, Workers, Running]:
    running = Running()
    workers = Workers(running, token_s, are_right=are_right)
    drafter = DrafterConfig("draft", SPEC, None, NUM_TOKENS, 1, MAX_MODEL_LEN)
    source = WorkerGuesses(drafter, workers.take, clock=lambda: workers.now_s)
    config = SpeculativeConfig("draft_model", NUM_TOKENS, "draft")
    return Speculation(config, NUM_SLOTS, source, clock=lambda: workers.now_s), workers, running


def run(speculation: Speculation, running: Running, num_steps: int) -> int:
    """Run steps that take a second, however many tokens they compute. Returns how many drafts they verified."""
    slots, num_verified = np.arange(NUM_SLOTS), 0
    for _ in range(num_steps):
        drafts = speculation.propose(slots, running, np.full(NUM_SLOTS, 50), 500, 0)
        num_drafts = int(drafts.lengths.sum())
        num_verified += num_drafts
        speculation.observe(NUM_SLOTS + num_drafts, num_drafts > 0, 1.0)
        running.received += 1
    return num_verified


def test_drafts_of_workers_that_pay_have_the_longest_allowed_length() -> None:
    speculation, workers, running = make(0.01, are_right=True)
    assert run(speculation, running, 50) > 40 * NUM_SLOTS * NUM_TOKENS
    assert workers.asked[-1] == ([0, 1, 2], [NUM_TOKENS] * NUM_SLOTS)


def test_right_drafts_of_workers_that_take_too_long_are_given_up() -> None:
    speculation, workers, running = make(2.0, are_right=True)
    run(speculation, running, 200)
    assert 1 <= len(workers.asked) < 12


def test_wrong_drafts_of_workers_are_given_up_and_tried_again() -> None:
    speculation, workers, running = make(0.05, are_right=False)
    run(speculation, running, 300)
    num_before = len(workers.asked)
    assert num_before < 40
    assert workers.asked[-1] == ([0, 1, 2], [2, 2, 2]), "a trial is short"
    workers.are_right = True
    run(speculation, running, 600)
    assert workers.asked[-1][1] == [NUM_TOKENS] * NUM_SLOTS, "they have been noticed to be right"


def test_sequences_too_long_for_the_draft_model_have_no_drafts() -> None:
    speculation, workers, running = make(0.01, are_right=True)
    run(speculation, running, 3)
    workers.asked.clear()
    running.received[:] = [MAX_MODEL_LEN, MAX_MODEL_LEN - 2, MAX_MODEL_LEN + 5]
    speculation.propose(np.arange(NUM_SLOTS), running, np.full(NUM_SLOTS, 50), 500, 0)
    assert workers.asked == [([1], [2])]
