"""A worker's rows of states as bytes, in parts of about equal size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class StateParts:
    """The parts of all rows, R of them. Their bytes are those of the layers' tensors, one after the other."""

    def __init__(self, states: Sequence[Tensor], num_parts: int) -> None:
        """
        Args:
            states: the memory of layers, each [layers, R, ...].
            num_parts: `KVCacheConfig.num_state_parts`.
        """
        self.num_parts = num_parts
        rows = [layer.flatten(1).view(torch.uint8) for state in states for layer in state]
        num_bytes = sum(row.shape[1] for row in rows)
        self.part_bytes = -(-num_bytes // num_parts) if num_parts else 0
        """The most bytes of a part."""
        self.pages = [_between(rows, part * self.part_bytes, (part + 1) * self.part_bytes) for part in range(num_parts)]
        """By part: uint8[R, n] each, views of the states."""

    def place_of(self, index: int) -> tuple[int, int]:
        """Return the row and the number of a part. `index`: that among the parts of all rows."""
        return divmod(index, self.num_parts)


def _between(rows: Sequence[Tensor], first: int, end: int) -> list[Tensor]:
    """Return views of the bytes from `first` to before `end` of rows, uint8[R, n], that follow each other."""
    found: list[Tensor] = []
    start = 0
    for row in rows:
        size = row.shape[1]
        if start < end and start + size > first:
            found.append(row[:, max(0, first - start) : end - start])
        start += size
    return found


NO_STATES = StateParts((), 0)
"""Those of a worker without layers that keep states."""
