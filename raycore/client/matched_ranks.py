"""Which ranks have how much of a prompt's beginning, for all ranks at once. Pure.

A set of ranks is an integer whose bit `i` stands for dp_rank `i`. The cost hardly grows with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Matched = list[tuple[int, int]]
"""(ranks, tokens) by descending sets of ranks: how many more leading tokens these ranks have than those before say."""


def matched(sets: Iterable[int], tokens_each: int) -> Matched:
    """Which ranks have all parts of a prompt from its first one on.

    Args:
        sets: for each part, in order, the ranks that have it.
        tokens_each: tokens in a part.
    """
    found: Matched = []
    seen = -1
    for ranks in sets:
        seen &= ranks
        if not seen:
            break
        if found and found[-1][0] == seen:
            found[-1] = seen, found[-1][1] + tokens_each
        else:
            found.append((seen, tokens_each))
    return found


def matched_with_states(sets: Iterable[tuple[int, int]], tokens_each: int) -> Matched:
    """As `matched`, where a rank's parts are of use up to the last one after which it has a state.

    Args:
        sets: for each part, in order, the ranks that have it, and those that have the state after it.
        tokens_each: tokens in a part.
    """
    seen, ends = -1, list[tuple[int, int]]()
    for place, (ranks, with_state) in enumerate(sets, 1):
        seen &= ranks
        if not seen:
            break
        if seen & with_state:
            ends.append((seen & with_state, place))
    found: Matched = []
    reached = 0
    """The ranks of which a later end is known."""
    for (ranks, place), before in zip(ends[::-1], [*(place for _, place in ends[-2::-1]), 0], strict=False):
        reached |= ranks
        found.append((reached, (place - before) * tokens_each))
    return found[::-1]


def tokens_by_rank(found: Matched, num_ranks: int) -> NDArray[np.int64]:
    """int64[num_ranks]: how many leading tokens each rank has. No rank in `found` has a higher number."""
    tokens = np.zeros(num_ranks, np.int64)
    for ranks, more in found:
        packed = np.frombuffer(ranks.to_bytes((num_ranks + 7) // 8, "little"), np.uint8)
        tokens += more * np.unpackbits(packed, count=num_ranks, bitorder="little").astype(np.int64)
    return tokens
