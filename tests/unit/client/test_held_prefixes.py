"""Routing by what ranks say that they hold."""

from __future__ import annotations

from raycore.client.held_prefixes import HeldPrefixes
from raycore.client.matched_ranks import tokens_by_rank
from raycore.client.routing import Placed, Router
from raycore.kvcache.prefix_cache import state_name
from raycore.messages import CacheChanges, LoadView

PROMPT = list(range(100, 165))  # 16 blocks of 4 tokens, and one token


def joined(held: HeldPrefixes, prompt: list[int], count: int) -> bytes:
    return b"".join(held.keys(prompt)[:count])


def test_leading_blocks_count():
    held = HeldPrefixes(4)
    keys = held.keys(PROMPT)
    assert len(keys) == 16
    held.take(3, CacheChanges(b"".join(keys[:5] + keys[6:])))
    assert held.match_stored(keys) == [(1 << 3, 20)]
    held.take(3, CacheChanges(keys[5]))
    assert held.match(keys) == [(1 << 3, 64)]
    assert held.match_stored(held.keys(PROMPT, "salt")) == []
    held.take(3, CacheChanges(removed=keys[2]))
    assert held.match_stored(keys) == [(1 << 3, 8)]
    held.take(3, CacheChanges(is_whole=True))
    assert held.match_stored(keys) == []


def test_blocks_count_up_to_one_with_a_state_after_it():
    held = HeldPrefixes(4, has_states=True)
    keys = held.keys(PROMPT)
    held.take(0, CacheChanges(b"".join(keys)))
    held.take(2, CacheChanges(b"".join(keys[:9])))
    assert held.match_stored(keys) == []
    held.take(0, CacheChanges(b"".join(map(state_name, (keys[3], keys[7])))))
    held.take(2, CacheChanges(b"".join(map(state_name, (keys[3], keys[8], keys[12])))))
    assert tokens_by_rank(held.match_stored(keys), 3).tolist() == [32, 0, 36]
    assert tokens_by_rank(held.match_stored(keys[:6]), 3).tolist() == [16, 0, 16]
    held.take(2, CacheChanges(removed=state_name(keys[8])))
    assert tokens_by_rank(held.match_stored(keys), 3).tolist() == [32, 0, 16]
    # a rank will have the state at the end of what it was sent
    held.add(keys[:12], 1)
    assert tokens_by_rank(held.match(keys), 3).tolist() == [32, 48, 16]
    held.forget(1)
    assert tokens_by_rank(held.match(keys), 3).tolist() == [32, 0, 16]


def test_what_was_sent_is_expected_until_the_rank_says_otherwise():
    held = HeldPrefixes(4)
    keys = held.keys(PROMPT)
    held.add(keys, 1)
    assert held.match(keys) == [(1 << 1, 64)]
    assert held.match_stored(keys) == []
    held.take(1, CacheChanges(b"".join(keys)))
    held.take(1, CacheChanges(removed=keys[0]))
    assert held.match(keys) == []
    held.add(keys, 1)
    held.forget(1)
    assert held.match(keys) == []


def test_requests_go_where_their_prefix_is_unless_that_rank_has_too_much_to_do():
    held = HeldPrefixes(4)
    router = Router([0, 1, 2], held)
    held.take(2, CacheChanges(joined(held, PROMPT, 16)))
    held.take(1, CacheChanges(joined(held, PROMPT, 4)))
    assert router.place(PROMPT) == Placed(2, 64)
    router.observe(2, LoadView(20, 20, 0.5))
    busy = router.place(PROMPT)
    assert (busy.rank, busy.holder, busy.num_elsewhere) == (1, 2, 64)
    assert busy.num_held == 16
    assert router.place(PROMPT, rank=0) == Placed(0, 0, 2, 64)
    assert router.place(PROMPT, among=slice(1)).rank == 0
    router.remove(2)
    assert router.place(PROMPT, rank=0) == Placed(0, 0, 1, 16)


def test_a_rank_alone_is_placed_and_short_prompts_have_no_blocks():
    held = HeldPrefixes(4)
    router = Router([7], held)
    assert router.place([1, 2, 3]) == Placed(7)
    assert router.place(PROMPT).rank == 7
    router.finish(7)
    assert router.num_own(7) == 1
