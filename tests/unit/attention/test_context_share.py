"""Every token belongs to one worker of a group, and its place follows from its position alone."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from raycore.attention.context_share import ContextShare

SHARES = strategies.tuples(strategies.integers(1, 6), strategies.integers(1, 40))


@hypothesis.given(SHARES, strategies.integers(0, 400))
def test_each_token_is_one_workers_and_keeps_its_order_there(share, count):
    size, block_size = share
    positions = np.arange(count)
    owners = np.stack([ContextShare(index, size, block_size).owns(positions) for index in range(size)])
    assert (owners.sum(0) == 1).all()
    for index, owns in enumerate(owners):
        own = ContextShare(index, size, block_size)
        # own tokens are numbered without gaps
        assert own.num_owned(positions[owns]).tolist() == list(range(owns.sum()))
        assert own.num_owned(positions).tolist() == [int(owns[:position].sum()) for position in positions]
        # all workers use the block that the scheduler counts for the position
        columns = own.num_owned(positions[owns]) // block_size
        assert (columns == positions[owns] // (block_size * size)).all()


@hypothesis.given(SHARES, strategies.integers(0, 400), strategies.none() | strategies.integers(1, 500))
def test_what_a_token_sees_is_one_range_of_each_workers_tokens(share, position, window):
    size, block_size = share
    seen = np.arange(max(0, position + 1 - (window or position + 1)), position + 1)
    found = []
    for index in range(size):
        own = ContextShare(index, size, block_size)
        (first,), (end,) = own.seen(np.array([position]), window)
        owned = np.flatnonzero(own.owns(np.arange(position + 1)))
        found += owned[first:end].tolist()
    assert sorted(found) == seen.tolist()


@pytest.mark.parametrize(("index", "first", "end"), [(0, 4, 8), (1, 4, 7), (2, 3, 4)])
def test_an_example(index, first, end):
    """Three workers, blocks of 4: token 22 is the third of worker 1's second block, and it sees tokens 11 to 22."""
    share = ContextShare(index, 3, 4)
    assert [int(x[0]) for x in share.seen(np.array([18]), 8)] == [first, end]
