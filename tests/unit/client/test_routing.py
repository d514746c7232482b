"""Requests go where the load is least, unless a prefix cache pays for a little more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from raycore.client.matched_ranks import Matched, tokens_by_rank
from raycore.client.routing import PrefixAffinity, RankLoad, Router, choose_rank, prompt_chunks
from raycore.messages import LoadView


def assign(router: Router, prompts: Sequence[Sequence[int]], **how: Any) -> list[int]:
    """The rank of each prompt."""
    return [router.place(prompt, **how).rank for prompt in prompts]


def tokens_of(found: Matched, dp_rank: int) -> int:
    """How many leading tokens a rank has, by definition."""
    return sum(tokens for ranks, tokens in found if ranks >> dp_rank & 1)


@pytest.mark.parametrize(
    ("loads", "matched", "expected"),
    [
        pytest.param([RankLoad()], None, 0, id="one rank"),
        pytest.param([RankLoad(), RankLoad()], None, 0, id="a tie goes to the first"),
        pytest.param([RankLoad(3), RankLoad(2)], None, 1, id="fewer requests"),
        pytest.param([RankLoad(8, 2), RankLoad(12)], None, 1, id="waiting ones weigh more"),
        pytest.param([RankLoad(2, 50), RankLoad(9)], None, 0, id="stale news of waiting ones don't"),
        pytest.param([RankLoad(2, 0, 3000), RankLoad(2, 0, 100)], None, 1, id="fewer prompt tokens"),
        pytest.param([RankLoad(), RankLoad()], [0, 64], 1, id="a short prefix breaks a tie"),
        pytest.param([RankLoad(), RankLoad(1)], [0, 64], 0, id="a short prefix does no more"),
        pytest.param([RankLoad(2), RankLoad(4)], [0, 2048], 1, id="a long prefix pays for some load"),
        pytest.param([RankLoad(2), RankLoad(8)], [0, 100_000], 0, id="no prefix pays for an overload"),
        pytest.param([RankLoad(2), RankLoad(1, 1)], [0, 1536], 1, id="both count"),
    ],
)
def test_the_rank_with_the_least_load_is_chosen_unless_a_cached_prefix_pays_for_more(
    loads: list[RankLoad], matched: list[int] | None, expected: int
):
    scores = np.array([load.score for load in loads])
    assert choose_rank(scores, None if matched is None else np.array(matched)) == expected


def test_equal_ranks_are_chosen_from_the_preferred_one_on():
    scores = np.array([1.0, 0.0, 2.0, 0.0, np.inf])
    assert [choose_rank(scores, preferred=preferred) for preferred in range(5)] == [1, 1, 3, 3, 1]


def test_clients_of_an_idle_engine_begin_with_different_ranks():
    firsts = {Router(range(64), client_index=index).place([1]).rank for index in range(16)}
    assert len(firsts) == 16


def test_as_many_ranks_are_chosen_from_as_there_are_however_they_come_and_go():
    """What is kept in arrays is what a comparison of all ranks finds."""
    draw, router, running = random.Random(3), Router(range(40)), list[int]()
    prompts = [[draw.randrange(5)] * draw.choice([64, 128, 700]) + [draw.randrange(99)] * 64 for _ in range(30)]
    affinity = PrefixAffinity()
    for _ in range(3000):
        what, rank = draw.random(), draw.randrange(44)
        if what < 0.02 and router.has(rank):
            router.remove(rank)
            affinity.forget(rank)
            running = [each for each in running if each != rank]
        elif what < 0.04 and not router.has(rank):
            router.add(rank)
        elif what < 0.2:
            router.observe(rank, LoadView(draw.randrange(3), draw.randrange(9), 0.0))
        elif what < 0.5 and running:
            router.finish(running.pop(draw.randrange(len(running))))
        else:
            prompt = draw.choice(prompts)
            found = affinity.match(prompt_chunks(prompt))
            loads = router.loads()
            scores = {each: loads[each].score - min(tokens_of(found, each) / 512, 4.0) for each in sorted(loads)}
            chosen = router.place(prompt).rank
            assert chosen == min(scores, key=scores.__getitem__)
            affinity.add(prompt_chunks(prompt), chosen)
            running.append(chosen)


def test_a_batch_of_requests_is_spread_evenly_over_ranks():
    router = Router(range(3))
    assert Counter(assign(router, [[1, 2, 3]] * 30)) == {0: 10, 1: 10, 2: 10}


def test_long_prompts_are_spread_by_their_tokens():
    router = Router(range(2))
    prompts = [[i] * (2000 if i % 2 == 0 else 10) for i in range(16)]
    ranks = assign(router, prompts)
    tokens = [sum(len(prompt) for prompt, rank in zip(prompts, ranks, strict=True) if rank == r) for r in range(2)]
    assert abs(tokens[0] - tokens[1]) <= 2000


def test_finished_requests_are_not_counted_in_a_ranks_load():
    router = Router(range(2))
    assert assign(router, [[1], [2]]) == [0, 1]
    router.finish(1)
    assert assign(router, [[3]]) == [1]


def test_prompt_tokens_of_finished_requests_are_not_counted_in_a_ranks_load():
    router = Router(range(2))
    assign(router, [[1] * 100, [2] * 100])
    router.finish(0)
    assert router.loads() == {0: RankLoad(0, 0, 0.0), 1: RankLoad(1, 0, 100.0)}


def test_requests_of_other_clients_count_in_a_ranks_load():
    router = Router(range(2))
    router.observe(0, LoadView(num_waiting=0, num_running=5, kv_usage=0.1))
    assert assign(router, [[1], [2], [3]]) == [1, 1, 1]


def test_a_clients_own_requests_count_once_in_a_ranks_load():
    router = Router(range(2))
    assign(router, [[1]] * 4)
    router.observe(0, LoadView(num_waiting=0, num_running=2, kv_usage=0.1))
    assert [load.num_requests for load in router.loads().values()] == [2, 2]


def test_a_conversation_returns_to_its_rank():
    router = Router(range(2))
    first = list(range(300))
    other = list(range(1000, 1300))
    rank_of_first, rank_of_other = assign(router, [first, other])
    assert rank_of_first != rank_of_other
    for rank in (rank_of_first, rank_of_other):
        router.finish(rank)
    assert assign(router, [[*other, 7, 8, 9]]) == [rank_of_other]


def test_a_prefix_shared_by_all_requests_overloads_no_rank():
    router = Router(range(2))
    shared = list(range(4096))
    counts = Counter(assign(router, [[*shared, i] for i in range(40)]))
    assert abs(counts[0] - counts[1]) <= 4


def test_affinity_matches_whole_chunks_from_the_beginning():
    affinity = PrefixAffinity()
    affinity.add(prompt_chunks(list(range(200))), 1)
    found = affinity.match(prompt_chunks(list(range(500))))
    assert tokens_by_rank(found, 2).tolist() == [tokens_of(found, 0), tokens_of(found, 1)] == [0, 192]
    assert affinity.match(prompt_chunks([5, *range(1, 500)])) == []
    assert prompt_chunks(list(range(63))) == []


def test_affinity_forgets_the_least_recently_used():
    affinity = PrefixAffinity(max_chunks=2)
    first, second, third = ([start] * 64 for start in (1, 2, 3))
    for prompt in (first, second, first, third):
        affinity.add(prompt_chunks(prompt), 0)
    assert [affinity.match(prompt_chunks(prompt)) for prompt in (first, second, third)] == [[(1, 64)], [], [(1, 64)]]


def test_a_removed_ranks_counts_are_forgotten():
    router = Router(range(2))
    prompt = list(range(300))
    (rank,) = assign(router, [prompt])
    assert (router.num_own(rank), router.num_own(1 - rank)) == (1, 0)
    router.remove(rank)
    assert router.num_own(rank) is None
    router.finish(rank)  # its request ended elsewhere
    assert assign(router, [prompt, prompt]) == [1 - rank] * 2
    router.add(rank)
    assert router.loads()[rank].num_requests == 0
    assert assign(router, [[1]]) == [rank]


def test_a_replaced_rank_has_no_cached_prefix():
    router = Router([0, 3])
    prompt = list(range(3000))
    (first,) = assign(router, [prompt])
    router.finish(first)
    assign(router, [prompt], rank=3 - first)
    router.finish(3 - first)
    router.remove(first)
    router.add(first)
    # equal loads, and only the other one has the prefix
    assert assign(router, [prompt]) == [3 - first]


def test_prompts_with_different_cache_salts_share_no_prefix():
    prompt = list(range(640))
    router = Router([0, 1])
    assert assign(router, [prompt], cache_salt="a") == [0]
    assert assign(router, [[5]]) == [1]
    assert assign(router, [prompt], cache_salt="b") == [1]
    assert assign(router, [prompt], cache_salt="a") == [0]
    assert prompt_chunks(prompt, "a")[0] != prompt_chunks(prompt)[0]


def test_a_request_that_names_its_rank_is_assigned_to_it():
    router = Router([0, 1])
    assert assign(router, [[1], [2], [3]], rank=1) == [1, 1, 1]
    assert router.loads()[1].num_requests == 3


def test_a_request_whose_named_rank_is_away_is_assigned_to_another_rank():
    router = Router([0, 1])
    router.remove(1)
    assert assign(router, [[1]], rank=1) == [0]
