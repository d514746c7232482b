"""Which requests get drafts, for how long, and when they are given up."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, count, repeat
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest
from drafts_by_slot import by_slot

from raycore.messages import DraftStats
from raycore.parts.drafts.config.speculative import SpeculativeConfig
from raycore.parts.drafts.guesses.drafts import NO_DRAFTS, Drafts
from raycore.parts.drafts.scheduler.speculation import Speculation

LOOP = [1, 2, 3, 4, 5, 6]


class Rank:
    """The running tokens of some slots, and the durations of steps."""

    def __init__(
        self,
        num_slots: int,
        seconds_for_draft: float = 0.0,
        looked_s: float = 0.0,
        method: Literal["ngram", "suffix"] = "ngram",
        num_timed: int = 3,
        **settings: Any,
    ) -> None:
        """
        Args:
            looked_s: how long it takes to look for guesses.
            num_timed: number of steps without drafts that have been timed: each took a second.
        """
        config = SpeculativeConfig(method, 3, prompt_lookup_min=2, prompt_lookup_max=2, **settings)
        self.speculation = Speculation(config, num_slots, clock=count(step=looked_s).__next__)
        self.running = SimpleNamespace(tokens=np.zeros((num_slots, 20000), np.int32), received=np.zeros(num_slots, int))
        self.seconds_for_draft = seconds_for_draft
        self.look_s = 0.0
        """How long the last look for guesses took, where that is set."""
        for _ in range(num_timed):
            self.speculation.observe(1, False, 1.0)

    def add(self, slot: int, tokens: list[int]) -> None:
        first = self.running.received[slot]
        self.running.tokens[slot, first : first + len(tokens)] = tokens
        self.running.received[slot] += len(tokens)

    def propose(self, *slots: int, limit: int = 100, budget: int = 100) -> dict[int, list[int]]:
        limits = np.full(len(slots), limit)
        drafts = self.speculation.propose(np.array(slots), self.running, limits, budget, num_other=0)
        num_drafts = len(drafts.token_ids)
        duration_s = 1 + self.look_s + num_drafts * self.seconds_for_draft
        self.look_s = 0.0
        self.speculation.observe(len(slots) + num_drafts, num_drafts > 0, duration_s)
        return by_slot(drafts)


def test_requests_that_repeat_themselves_get_drafts() -> None:
    rank = Rank(3)
    rank.add(0, [*LOOP, 1, 2])
    rank.add(1, LOOP)
    rank.add(2, [7, 8, 9, 7, 8])
    assert rank.propose(0, 1, 2) == {0: [3, 4, 5], 2: [9, 7, 8]}
    rank.add(1, [2, 3])
    assert rank.propose(1) == {1: [4, 5, 6]}


def test_drafts_respect_the_limits_of_requests_and_steps() -> None:
    rank = Rank(2)
    rank.add(0, [*LOOP, 1, 2])
    rank.add(1, [*LOOP, 1, 2])
    assert rank.propose(0, limit=2) == {0: [3, 4]}
    assert rank.propose(0, limit=0) == {}
    assert rank.propose(0, limit=-1) == {}
    assert sum(map(len, rank.propose(0, 1, budget=4).values())) == 4
    assert rank.propose(0, 1, budget=0) == {}


def test_a_slots_next_request_gets_no_drafts_from_the_previous_one() -> None:
    rank = Rank(1)
    rank.add(0, [*LOOP, 1, 2])
    assert rank.propose(0)
    rank.speculation.forget(0, num_prompt_tokens=3)
    rank.running.received[0] = 0
    rank.add(0, [1, 2])
    assert rank.propose(0) == {}


def test_a_long_prompt_is_indexed_over_several_steps() -> None:
    rank = Rank(1, method="suffix")
    rank.add(0, [*range(3000), 1000, 1001])
    assert [bool(rank.propose(0)) for _ in range(4)] == [False, False, True, True]


def test_drafts_that_cost_too_much_are_given_up_and_tried_again() -> None:
    """The first token of each guess is right, the second one wrong, and a draft takes as long as a step."""
    rank = Rank(1, seconds_for_draft=1.0)
    rng = np.random.default_rng(0)
    drafted = []
    for _ in range(4500):
        rank.add(0, [1, 2])
        drafted.append(bool(rank.propose(0)))
        rank.add(0, [3, int(rng.integers(10, 4000))])
    assert sum(drafted[1:300]) in range(1, 30)
    assert any(drafted[300:]), "the machine may have changed"


def test_right_drafts_are_kept_although_they_make_steps_slower() -> None:
    rank = Rank(1, seconds_for_draft=0.3)
    rank.add(0, LOOP)
    position = 0
    lengths = []
    for _ in range(200):
        draft = rank.propose(0).get(0, [])
        lengths.append(len(draft))
        rank.add(0, [LOOP[(position + i) % 6] for i in range(len(draft) + 1)])
        position += len(draft) + 1
    assert lengths[20:].count(3) > 175, "only now and then, it is tried what a step without drafts takes"


def test_a_request_whose_guesses_become_right_gets_drafts_again() -> None:
    rank = Rank(1, seconds_for_draft=0.5)
    rng = np.random.default_rng(0)
    rank.add(0, LOOP)
    for _ in range(100):
        rank.add(0, [1, 2])
        rank.propose(0)
        rank.add(0, rng.integers(10, 4000, 1).tolist())
    assert rank.propose(0) == {}
    for _ in range(60):
        rank.add(0, LOOP)
        rank.propose(0)
    assert rank.propose(0) == {0: [1, 2, 3]}


@pytest.mark.parametrize("num_slots", [1, 8])
def test_there_are_no_drafts_before_steps_without_them_have_been_timed(num_slots: int) -> None:
    """Else all steps could have drafts from the first one on, and nothing would show that they don't pay."""
    rank = Rank(num_slots, num_timed=0)
    for slot in range(num_slots):
        rank.add(slot, [*LOOP, 1, 2])
    assert [bool(rank.propose(*range(num_slots))) for _ in range(5)] == [False, False, False, True, True]


def test_a_fixed_number_of_tokens_is_guessed_whatever_it_costs() -> None:
    rank = Rank(2, seconds_for_draft=100.0, num_speculative_tokens_per_batch_size=[(1, 1, 2), (2, 2, 0)])
    for slot in range(2):
        rank.add(slot, [*LOOP, 1, 2])
    for _ in range(10):
        assert rank.propose(0) == {0: [3, 4]}
        assert rank.propose(0, budget=1) == {0: [3]}
        assert rank.propose(0, 1) == {}


def test_long_prompts_do_not_make_short_steps_look_slow() -> None:
    rank = Rank(4, num_timed=0)
    for _ in range(3):
        rank.speculation.observe(512, False, 20.0)
    rank.add(0, [*LOOP, 1, 2])
    assert rank.propose(0) == {}
    for _ in range(3):
        rank.speculation.observe(1, False, 1.0)
    assert rank.propose(0) == {0: [3, 4, 5]}


def test_times_of_steps_with_prompts_show_the_cost_of_drafts() -> None:
    """So no step has to try it."""
    rank = Rank(4)
    for _ in range(3):
        rank.speculation.observe(4, False, 1.0)
        rank.speculation.observe(512, False, 512.0)
    for slot in range(4):
        rank.add(slot, [*LOOP, 1, 2])
    assert rank.propose(0, 1, 2, 3) == {}


def test_fruitless_searches_for_guesses_take_a_small_share_of_the_time() -> None:
    """A step takes a second."""
    rank = Rank(1, looked_s=0.05)  # and as long again for the step's time
    looks = []
    guess = rank.speculation._source.guess
    rank.speculation._source.guess = lambda *args: looks.append(1) or guess(*args)  # type: ignore[method-assign]
    for token in range(1000):
        rank.add(0, [token])
        assert rank.propose(0) == {}
    assert len(looks) in range(40, 60)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def looking_rank(num_slots: int, looks_s: Iterable[float]) -> tuple[Rank, list[int]]:
    """Requests that never repeat themselves. Looking for guesses takes `looks_s`.

    Returns: the rank, and the numbers of slots at each look.
    """
    rank, clock, durations_s, looks = Rank(num_slots), Clock(), iter(looks_s), list[int]()
    rank.speculation._clock = clock

    def guess(slots, *_args: Any) -> Drafts:
        looks.append(len(slots))
        rank.look_s = next(durations_s)
        clock.now_s += rank.look_s
        return NO_DRAFTS

    rank.speculation._source.guess = guess  # type: ignore[method-assign]
    for slot in range(num_slots):
        rank.add(slot, [slot])
    for _ in range(3):
        rank.speculation.observe(num_slots, False, 1.0)
    return rank, looks


def test_an_interrupted_search_for_guesses_causes_no_long_pause() -> None:
    rank, looks = looking_rank(4, chain(repeat(0.002, 10), [5.0], repeat(0.002)))
    for _ in range(40):
        rank.propose(0, 1, 2, 3)
    assert len(looks) > 35


def test_the_pause_between_searches_gets_shorter_when_requests_leave() -> None:
    """All of them have been looked at in vain, but not those that come."""
    rank, looks = looking_rank(4, repeat(0.15))
    while rank.speculation.is_looking:
        rank.propose(0, 1, 2, 3)
    for slot in range(3):
        rank.speculation.forget(slot, num_prompt_tokens=1)
    num_before, num_steps = len(looks), 0
    while len(looks) == num_before:
        rank.propose(0, 1, 2, 3)
        num_steps += 1
    assert num_steps in range(5, 10), "a quarter of 30 is left"


def test_requests_without_room_for_drafts_are_not_searched() -> None:
    rank, looks = looking_rank(2, repeat(0.0))
    rank.propose(0, 1, limit=0)
    rank.speculation.propose(np.array([0, 1]), rank.running, np.array([0, 3]), 100, 0)
    assert looks == [1]


def test_a_step_full_of_prompts_has_no_drafts() -> None:
    rank = Rank(1)
    rank.add(0, [*LOOP, 1, 2])
    arguments = np.array([0]), rank.running, np.array([100]), 100
    assert by_slot(rank.speculation.propose(*arguments, num_other=4)) == {}
    assert by_slot(rank.speculation.propose(*arguments, num_other=3)) == {0: [3, 4, 5]}


def test_drafts_that_turn_out_worse_than_expected_are_given_up() -> None:
    """The rates say that nearly all tokens are right, but among the verified ones only a third is."""
    rank = Rank(1, seconds_for_draft=0.5)
    rank.add(0, LOOP)
    position = 0
    num_drafted = []
    for _ in range(200):
        draft = rank.propose(0).get(0, [])
        num_drafted.append(len(draft))
        if draft:
            rank.speculation.count(np.array([0]), np.array([len(draft)]), np.array([len(draft) // 3]))
        rank.add(0, [LOOP[(position + i) % 6] for i in range(4)])
        position += 4
    assert max(num_drafted[:10]) == 3
    assert sum(num_drafted[100:]) < 30


def test_accepted_and_proposed_drafts_are_counted() -> None:
    rank = Rank(1)
    rank.speculation.count(np.array([0, 0]), np.array([3, 3]), np.array([2, 0]))
    rank.speculation.count(np.array([0]), np.array([1]), np.array([1]))
    assert rank.speculation.stats == DraftStats(3, 7, (2, 1, 0))
