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


def tokens_by_rank(found: Matched, num_ranks: int) -> NDArray[np.int64]:
    """int64[num_ranks]: how many leading tokens each rank has. No rank in `found` has a higher number."""
    tokens = np.zeros(num_ranks, np.int64)
    for ranks, more in found:
        packed = np.frombuffer(ranks.to_bytes((num_ranks + 7) // 8, "little"), np.uint8)
        tokens += more * np.unpackbits(packed, count=num_ranks, bitorder="little").astype(np.int64)
    return tokens
