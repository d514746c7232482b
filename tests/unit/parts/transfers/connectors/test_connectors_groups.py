"""Which blocks of a prefix have to come from elsewhere, for each group of layers."""

from __future__ import annotations

import pytest

from raycore.cache_layout import CacheGroup, CacheLayout, CacheLimits, KVCacheConfig
from raycore.kvcache.prefix_cache import DIGEST_BYTES
from raycore.parts.transfers.connectors.groups import GroupBlocks, block_name

BLOCKS = GroupBlocks([None, 9], 4)
"""A token after n full blocks sees 8 tokens of them in the second group: two blocks."""


@pytest.mark.parametrize(
    ("group", "first", "end", "expected"), [(0, 2, 7, range(2, 7)), (1, 2, 7, range(5, 7)), (1, 6, 7, range(6, 7))]
)
def test_a_window_needs_its_last_blocks_only(group: int, first: int, end: int, expected: range) -> None:
    assert BLOCKS.needed(group, first, end) == expected
    assert BLOCKS.num_needed(0, 7) == 7 + 2


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (set(), 9),
        ({(0, 5)}, 5),
        ({(1, 5)}, 9),  # nobody sees it any more
        ({(1, 8)}, 8),
        ({(1, 7)}, 7),
        ({(1, 8), (1, 6)}, 6),
        ({(1, place) for place in range(2, 9)}, 2),
        ({(0, 3), (1, 2)}, 2),
    ],
)
def test_the_longest_prefix_has_all_blocks_that_are_seen(missing: set[tuple[int, int]], expected: int) -> None:
    assert BLOCKS.longest(1, 9, lambda group, place: (group, place) not in missing) == expected


def test_what_the_cache_has_is_the_least() -> None:
    assert BLOCKS.longest(4, 9, lambda group, place: False) == 4
    assert GroupBlocks([9], 4).longest(4, 9, lambda group, place: place == 8) == 4
    # the cache has what is seen of the blocks before
    assert GroupBlocks([9], 4).longest(4, 9, lambda group, place: place == 4) == 5


def test_a_prefix_needs_the_parts_of_the_state_after_it() -> None:
    layout = CacheLayout((CacheGroup("full", ()),), CacheLimits(4, 64, 64))
    blocks = GroupBlocks.of(KVCacheConfig(9, layout, num_state_parts=2), 4)
    assert [list(blocks.needed(group, 3, 7)) for group in range(3)] == [[3, 4, 5, 6], [6], [6]]
    assert blocks.order == [1, 2, 0]
    kept = {1: {2, 5, 6}, 2: {2, 5, 7}}
    for end, expected in ((9, 6), (6, 6), (5, 3), (2, 1)):
        assert blocks.longest(1, end, lambda group, place: not group or place in kept[group]) == expected
    # the state of what the cache has is there
    assert blocks.longest(3, 5, lambda group, place: not group) == 3


def test_blocks_of_groups_have_names_of_their_own() -> None:
    digests = [bytes([number]) * DIGEST_BYTES for number in range(4)]
    names = {block_name(digest, group) for digest in digests for group in (0, 1, 2, 256, 257)}
    assert len(names) == 20
    assert {len(name) for name in names} == {DIGEST_BYTES}
    assert names >= set(digests), "those of the first group are what they are without groups"
