"""Scratch memory for gathered keys and values: allocated once, and shared by all layers and steps.

Attention gathers the keys and values of as many requests at a time as fit into this memory, which holds at least one
request. This bounds the memory of a step, whatever the lengths of its requests.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycore.attention.kv_tensors import KVTensors

SCRATCH_BYTES = 128 << 20
"""Maximum bytes of scratch memory, unless one request needs more.

Gathering this much takes a thousand times as long as starting another matrix product.
"""


def num_scratch_blocks(bytes_per_block: int, max_seqs: int, max_blocks: int) -> int:
    """Return how many blocks of one layer the scratch memory holds.

    Args:
        bytes_per_block: bytes of one block's keys and values in one layer.
        max_seqs: maximum number of requests in a step.
        max_blocks: maximum number of blocks of one request.
    """
    return max(max_blocks, min(max_seqs * max_blocks, SCRATCH_BYTES // bytes_per_block))


class GatherScratch:
    """Scratch memory that holds `num_scratch_blocks` blocks of one layer."""

    def __init__(self, kv: KVTensors, max_seqs: int, max_blocks: int) -> None:
        rows_per_block = 2 * kv.num_kv_heads
        blocks_NX = kv.blocks[0]
        bytes_per_block = rows_per_block * blocks_NX.shape[1] * blocks_NX.element_size()
        self.num_blocks = num_scratch_blocks(bytes_per_block, max_seqs, max_blocks)
        self._rows = blocks_NX.new_empty(self.num_blocks * rows_per_block, blocks_NX.shape[1])

    def rows(self, num_rows: int) -> Tensor:
        """Return the first rows, [num_rows, S·H], to be overwritten. As in `KVTensors.blocks`, a block has 2·K rows."""
        return self._rows[:num_rows]


def groups_that_fit(num_blocks_B: NDArray[np.int64], capacity: int) -> list[NDArray[np.int64]]:
    """Divide B requests into groups whose keys and values are gathered together.

    Within a group, all requests are padded to the longest. If all requests fit, they form one group, in their own
    order. Otherwise groups are formed in descending order of length, so that there is little padding. Returns the
    indexes of each group's requests.

    Args:
        num_blocks_B: number of blocks of each request.
        capacity: maximum number of blocks of a group, padding included. At least the longest request's number.
    """
    if len(num_blocks_B) * int(num_blocks_B.max()) <= capacity:
        return [np.arange(len(num_blocks_B))]
    order = np.argsort(-num_blocks_B, kind="stable")
    groups: list[NDArray[np.int64]] = []
    first = 0
    while first < len(order):
        size = capacity // int(num_blocks_B[order[first]])
        groups.append(order[first : first + size])
        first += size
    return groups
