"""Rows of blocks by slot."""

import numpy as np
import pytest

from raycore.kvcache.block_pool import BlockPool
from raycore.kvcache.block_table import BlockTable
from raycore.kvcache.prefix_cache import CachedPrefix


@pytest.fixture
def table() -> BlockTable:
    return BlockTable(num_slots=3, max_tokens=20, block_size=4, pool=BlockPool(10))


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
