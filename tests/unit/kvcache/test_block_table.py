"""Rows of blocks by slot."""

import numpy as np
import pytest

from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.block_table import BlockTable
from raycore.kvcache.prefix_cache import CachedPrefix, PrefixCache


@pytest.fixture
def table() -> BlockTable:
    return BlockTable(num_slots=3, max_tokens=20, block_size=4, pool=BlockPool(10, PrefixCache()))


def test_a_row_of_the_block_table_grows_by_the_missing_blocks(table: BlockTable) -> None:
    assert table.num_missing(1, 9) == 3
    assert len(table.grow(1, 9)) == 3
    assert table.grow(1, 12) == []
    assert table.capacity.tolist() == [0, 12, 0]
    assert len(table.grow(1, 13)) == 1
    assert len(table.row(1)) == 4
    table.check_integrity()


def test_several_rows_of_the_block_table_grow_at_once(table: BlockTable) -> None:
    table.grow(0, 4)
    first = table.row(0).tolist()
    added = table.grow_each(np.array([0, 2]))
    assert table.row(0).tolist() == [*first, added[0]]
    assert table.row(2).tolist() == [added[1]]
    assert table.capacity.tolist() == [8, 0, 4]
    table.check_integrity()


def test_rows_share_blocks_until_both_end(table: BlockTable) -> None:
    table.grow(0, 8)
    shared = table.row(0).tolist()
    table.begin(1, CachedPrefix(2, [shared]))
    table.grow(1, 12)
    assert table.row(1).tolist()[:2] == shared
    table.end(0)
    assert table.pool.num_free == 7
    table.check_integrity()
    table.end(1)
    assert table.pool.num_free == 10
    table.check_integrity()


@pytest.fixture
def grouped() -> BlockTable:
    """A group that keeps all tokens, and two with a window of 6."""
    return BlockTable(num_slots=3, max_tokens=40, block_size=4, pool=BlockPool(40, PrefixCache()), windows=[None, 6, 6])


def test_all_groups_of_a_slot_grow_together(grouped: BlockTable) -> None:
    assert grouped.num_missing(1, 9) == 9
    added = grouped.grow(1, 9)
    assert [grouped.row(1, group).tolist() for group in range(3)] == [added[0::3], added[1::3], added[2::3]]
    assert grouped.rows(1).tolist() == added
    more = grouped.grow_each(np.array([1, 2])).tolist()
    assert grouped.rows(1).tolist() == added + more[:3]
    assert grouped.rows(2).tolist() == more[3:]
    assert grouped.capacity.tolist() == [0, 16, 4]
    grouped.check_integrity()


def test_places_are_those_of_the_first_group(grouped: BlockTable) -> None:
    grouped.grow(2, 3)
    grouped.grow(1, 9)
    first, second, third = grouped.row(1).tolist()
    (other,) = grouped.row(2).tolist()
    slots, positions = np.array([1, 1, 2, 1, 1]), np.array([0, 3, 2, 4, 8])
    expected = [first * 4, first * 4 + 3, other * 4 + 2, second * 4, third * 4]
    assert grouped.places(slots, positions).tolist() == expected


def test_blocks_are_given_back_once_no_token_sees_them(grouped: BlockTable) -> None:
    added = grouped.grow(0, 20)
    for num_computed, num_free in ((8, 25), (9, 27), (12, 27), (13, 29), (13, 29), (20, 31)):
        grouped.release_unseen(np.array([0]), np.array([num_computed]))
        assert grouped.pool.num_free == num_free, num_computed
        grouped.check_seen(np.array([num_computed, 0, 0]))
    assert grouped.num_held(0) == [5, 2, 2]
    assert grouped.row(0).tolist() == added[0::3]
    grouped.check_integrity()
    grouped.end(0)
    assert grouped.pool.num_free == 40


def test_a_slot_begins_with_the_last_blocks_of_windows(grouped: BlockTable) -> None:
    added = grouped.grow(0, 16)
    by_group = [added[group::3] for group in range(3)]
    cached = CachedPrefix(4, [by_group[0], by_group[1][2:], by_group[2][2:]])
    grouped.begin(1, cached)
    assert grouped.num_held(1) == [4, 2, 2]
    assert grouped.row(1, 1).tolist()[2:] == by_group[1][2:]
    grouped.end(0)
    assert grouped.pool.num_free == 40 - 8
    grouped.check_integrity()
    grouped.end(1)
    assert grouped.pool.num_free == 40
