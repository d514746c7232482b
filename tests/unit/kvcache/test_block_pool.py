"""Reference counts, free blocks, eviction order."""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.prefix_cache import PrefixCache

NUM_BLOCKS = 8


def ids(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, np.int32)


def cached_pool(num_blocks: int) -> tuple[BlockPool, PrefixCache]:
    cache = PrefixCache()
    return BlockPool(num_blocks, cache), cache


def test_blank_blocks_go_before_cached_ones() -> None:
    pool, cache = cached_pool(4)
    first = pool.take(2)
    cache.insert(b"a", first[0])
    pool.release(ids(first))
    assert pool.num_free == 4
    assert first[0] not in pool.take(3)
    assert first[0] in cache
    assert pool.take(1) == first[:1]
    assert first[0] not in cache


def test_eviction_takes_the_least_recently_used_chain_from_its_end() -> None:
    pool, cache = cached_pool(6)
    chains = [pool.take(2), pool.take(2), pool.take(2)]
    for chain in chains:
        for block in chain:
            cache.insert(bytes([block]), block)
    for chain in (chains[1], chains[0], chains[2]):
        pool.release(ids(chain))
    pool.share(chains[1])
    pool.release(ids(chains[1]))
    expected = [block for chain in (chains[0], chains[2], chains[1]) for block in reversed(chain)]
    assert [pool.take(1)[0] for _ in range(6)] == expected


def test_a_shared_block_is_free_when_its_last_holder_releases_it() -> None:
    pool, cache = cached_pool(2)
    [block] = pool.take(1)
    cache.insert(b"a", block)
    pool.share([block])
    pool.release(ids([block]))
    assert (pool.num_free, pool.num_free_among([block]), pool.usage) == (1, 0, 0.5)
    pool.release(ids([block]))
    assert (pool.num_free, pool.num_free_among([block]), pool.usage) == (2, 1, 0.0)


def test_every_block_is_blank_while_nothing_is_cached() -> None:
    pool, _ = cached_pool(3)
    pool.release(ids(pool.take(3)))
    pool.forget()
    assert sorted(pool.take(3)) == [0, 1, 2]


class PoolMachine(RuleBasedStateMachine):
    """Holders come and go; after each, the books must balance and cached content must not be given away too early."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.cache = cached_pool(NUM_BLOCKS)
        self.holdings: list[list[int]] = []
        self.num_digests = 0

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count: int) -> None:
        if count > self.pool.num_free:
            return
        blocks = self.pool.take(count)
        assert len(blocks) == len(set(blocks)) == count
        assert not {block for held in self.holdings for block in held} & set(blocks)
        assert not any(block in self.cache for block in blocks)
        self.holdings.append(blocks)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        for block in data.draw(st.sampled_from(self.holdings)):
            if block not in self.cache:
                self.num_digests += 1
                self.cache.insert(self.num_digests.to_bytes(16, "little"), block)

    @precondition(lambda self: len(self.cache))
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        known = [block for block in range(NUM_BLOCKS) if block in self.cache]
        blocks = data.draw(st.lists(st.sampled_from(known), unique=True, min_size=1))
        self.pool.share(blocks)
        self.holdings.append(blocks)

    @precondition(lambda self: self.holdings)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.holdings) - 1))
        self.pool.release(ids(self.holdings.pop(index)))

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert len(self.cache) == 0

    @invariant()
    def books_balance(self) -> None:
        held = [block for blocks in self.holdings for block in blocks]
        self.pool.check_integrity(np.bincount(np.array(held, np.int64), minlength=NUM_BLOCKS))
        assert self.pool.num_free == NUM_BLOCKS - len(set(held))


PoolMachine.TestCase.settings = settings(max_examples=20, stateful_step_count=25)
TestPoolMachine = PoolMachine.TestCase
