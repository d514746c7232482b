"""The memory that keys and values are gathered into: allocated once, shared by all layers and steps.

Attention gathers the keys and values of as many requests at a time as fit, and of one request always. That bounds what
a step takes, whatever the lengths of its requests are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from raycore.model.attention.kv_tensors import KVTensors

SCRATCH_BYTES = 128 << 20
"""Unless one request needs more. Gathering this much takes a thousand times as long as starting another product."""


def num_scratch_blocks(bytes_per_block: int, max_seqs: int, max_blocks: int) -> int:
    """How many blocks of one layer the scratch memory holds.

    Args:
        bytes_per_block: of one block's keys and values in one layer.
        max_blocks: of one request.
    """
    return max(max_blocks, min(max_seqs * max_blocks, SCRATCH_BYTES // bytes_per_block))


class GatherScratch:
    """Scratch memory for the blocks of one layer, as many as `num_scratch_blocks` says."""

    def __init__(self, kv: KVTensors, max_seqs: int, max_blocks: int) -> None:
        rows_per_block = 2 * kv.num_kv_heads
        blocks_NX = kv.blocks[0]
        bytes_per_block = rows_per_block * blocks_NX.shape[1] * blocks_NX.element_size()
        self.num_blocks = num_scratch_blocks(bytes_per_block, max_seqs, max_blocks)
        self._rows = blocks_NX.new_empty(self.num_blocks * rows_per_block, blocks_NX.shape[1])

    def rows(self, num_rows: int) -> Tensor:
        """[num_rows, S·H]: the first rows, to be overwritten. As in `KVTensors.blocks`, 2·K of them are a block."""
        return self._rows[:num_rows]


def groups_that_fit(num_blocks_B: NDArray[np.int64], capacity: int) -> list[NDArray[np.int64]]:
    """Which of B requests to gather together, padded to the longest of them.

    Requests of similar length go together, so that little is padded. All are one group, in their own order, if they
    fit. The order is otherwise by length, and among equals their own.

    Args:
        num_blocks_B: blocks of each request.
        capacity: blocks that a group may have, padding included; at least the longest request's.
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
