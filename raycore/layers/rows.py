"""Batch invariance of row-wise functions: a row's result has the same bits whatever other rows are computed with it.

In a matrix product, the shape determines the kernel, the blocking and the threads, and these determine the order in
which a row's sums are added up and rounded. With tiles of one shape, the order is always the same. A row's bits may
still depend on its position in the tile: `is_order_invariant` tests this. Element-wise functions need no tiles, but
must not be split among threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

TILE_ROWS = 16
"""Number of rows in a tile: a multiple of the rows that kernels process together. Tiles start on 64-byte lines."""
_SHARED_FROM = 1 << 15
"""Torch splits operations on at least this many elements among threads."""


class Tiles:
    """Applies functions to tiles of `num_rows` rows. The last tile is padded with zeros."""

    def __init__(self, num_rows: int = TILE_ROWS) -> None:
        self.num_rows = num_rows

    def apply(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Return `function(*tensors)`, computed one tile at a time. The function may overwrite its arguments."""
        total, size = len(tensors[0]), self.num_rows
        num_left = total % size
        tiles = [function(*tile) for tile in _slices(tensors, size, total - num_left)]
        if num_left or not tiles:
            tiles.append(function(*(_last_tile(x, num_left, size) for x in tensors))[:num_left])
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def on_one_thread(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return `function(*tensors)` for a row-wise function, computed for so few rows at a time that torch uses one
    thread.

    With several threads, a row may be cut in two. Elements next to the cut are then computed by scalar instructions,
    which round differently from the vector instructions that compute the others, and sums are added in another order.
    """
    num_rows = max(1, (_SHARED_FROM - 1) // max(1, tensors[0][0].numel())) if len(tensors[0]) else 1
    if num_rows >= len(tensors[0]):
        return function(*tensors)
    return torch.cat([function(*part) for part in _slices(tensors, num_rows, len(tensors[0]))])


def row_by_row(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the element-wise `function` with a loop of its own for each row of its two-dimensional argument.

    If there is nothing between rows, torch treats them as one long row. Vector instructions compute most of it, and
    scalar instructions the rest, so an element's bits depend on how many rows there are.
    """
    return lambda x: function(functional.pad(x, [0, 1])[:, :-1])


def is_order_invariant(function: Callable[..., Tensor], *tensors: Tensor) -> bool:
    """Whether the bits of each row's result stay the same when the rows of a tile are permuted.

    `function` may overwrite its arguments. It is called equally often whatever the result, because ranks may wait for
    each other in it.
    """
    expected = function(*(x.clone() for x in tensors))
    shifts = (1, len(expected) // 2)
    moved = [function(*(x.roll(shift, 0) for x in tensors)) for shift in shifts]
    return all(torch.equal(result.roll(-shift, 0), expected) for result, shift in zip(moved, shifts, strict=True))


def _slices(tensors: tuple[Tensor, ...], size: int, end: int) -> list[list[Tensor]]:
    """Return the tensors' rows before `end`, in slices of `size` rows."""
    return [[x[start : start + size] for x in tensors] for start in range(0, end, size)]


def _last_tile(x: Tensor, num_left: int, size: int) -> Tensor:
    """Return the last `num_left` rows of `x`, padded with zeros to `size` rows."""
    padding = [0, 0] * (x.dim() - 1) + [0, size - num_left]
    return functional.pad(x[len(x) - num_left :], padding)
