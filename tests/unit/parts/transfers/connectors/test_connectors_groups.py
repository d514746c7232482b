"""Which blocks of a prefix have to come from elsewhere, for each group of layers."""

from __future__ import annotations

import pytest

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


def test_blocks_of_groups_have_names_of_their_own() -> None:
    digests = [bytes([number]) * DIGEST_BYTES for number in range(4)]
    names = {block_name(digest, group) for digest in digests for group in range(3)}
    assert len(names) == 12
    assert {len(name) for name in names} == {DIGEST_BYTES}
    assert names >= set(digests), "those of the first group are what they are without groups"
