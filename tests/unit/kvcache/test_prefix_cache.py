"""The digest chain and the map between digests and blocks."""

import numpy as np

from raycore.kvcache.prefix_cache import DIGEST_BYTES, NOTHING_CACHED, PrefixCache, extend_digests, root_digest


def digests_of(tokens: list[int], num_blocks: int, block_size: int = 2) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, np.array(tokens, np.int32), num_blocks, block_size)
    return digests


def test_a_blocks_digest_depends_on_the_whole_prefix() -> None:
    one, other = digests_of([1, 2, 3, 4], 2), digests_of([9, 2, 3, 4], 2)
    assert len(one) == len(set(one + other)) - 2 == 2
    assert digests_of([1, 2, 7, 7], 2)[0] == one[0]


def test_digests_extended_in_steps_equal_digests_computed_at_once() -> None:
    tokens = np.arange(10, dtype=np.int32)
    digests: list[bytes] = []
    for num_blocks in (1, 1, 3, 5, 2):
        extend_digests(digests, tokens, num_blocks, 2)
    assert digests == digests_of(list(range(10)), 5)


def test_match_returns_the_longest_known_prefix() -> None:
    cache, digests = PrefixCache(), digests_of(list(range(8)), 4)
    for block in (0, 1, 3):
        cache.insert(digests[block], block + 10)
    assert cache.match(digests, 4).blocks == [[10, 11]]
    assert cache.match(digests, 1).blocks == [[10]]
    cache.remove(10)
    assert cache.match(digests, 4).blocks == []
    cache.check_integrity()


def test_of_blocks_with_equal_digests_the_first_is_kept() -> None:
    cache, digests = PrefixCache(), digests_of([1, 2], 1)
    cache.insert(digests[0], 5)
    cache.insert(digests[0], 6)
    assert cache.match(digests, 1).blocks == [[5]]
    assert 5 in cache
    assert 6 not in cache
    assert len(cache) == 1
    cache.check_integrity()


def test_a_salt_makes_another_prefix_of_the_same_tokens() -> None:
    roots = [root_digest(None), root_digest("a"), root_digest("b")]
    chains = []
    for root in roots:
        digests: list[bytes] = []
        extend_digests(digests, np.array([1, 2, 3, 4], np.int32), 2, 2, root)
        chains.append(digests)
    assert len({digest for digests in chains for digest in digests}) == 6
    assert chains[0] == digests_of([1, 2, 3, 4], 2)


def test_the_digest_of_a_salt_differs_from_that_of_a_block_with_the_same_bytes() -> None:
    """Its digest is another function than a block's, so no salt can be chosen to continue another's prefix."""
    tokens = np.array([0x61616161, 0x61616161], np.int32)
    assert root_digest("\0" * DIGEST_BYTES + "a" * 8) != digests_of(tokens.tolist(), 1)[0]


def test_a_prefix_is_cached_if_each_group_has_what_later_tokens_see() -> None:
    cache, digests = PrefixCache(2, [None, 4]), digests_of(list(range(12)), 6)
    for index, digest in enumerate(digests):
        cache.insert(digest, index)
    for index in (1, 2, 5):
        cache.insert(digests[index], index + 10, 1)
    assert cache.match(digests, 6) == (3, [[0, 1, 2], [11, 12]])
    assert cache.match(digests, 2) == NOTHING_CACHED, "its window begins in the first block"
    cache.insert(digests[4], 14, 1)
    assert cache.match(digests, 6) == (6, [[0, 1, 2, 3, 4, 5], [14, 15]])
    cache.remove(3)
    assert cache.match(digests, 6) == (3, [[0, 1, 2], [11, 12]]), "of what keeps all tokens, one is missing"
    cache.check_integrity()


def test_a_window_of_one_token_needs_nothing_before_it() -> None:
    cache, digests = PrefixCache(2, [None, 1]), digests_of(list(range(4)), 2)
    for index, digest in enumerate(digests):
        cache.insert(digest, index)
    assert cache.match(digests, 2) == (2, [[0, 1], []])
