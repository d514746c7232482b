"""How the row-wise part of a step is cut up: all rows at once, or in tiles of one shape.

A matrix product picks its kernel, its blocks and its threads by shape, and with them the order in which a row's sums
are rounded. Tiles of one shape have one order. What remains is that a row's bits may depend on its place in the tile:
`keeps_places` finds out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

TILE_ROWS = 16
"""A multiple of what kernels take at a time, so that every tile of a tensor starts on a 64-byte line."""
_SHARED_FROM = 1 << 15
"""Torch shares element-wise work of this many elements among threads."""


class Rows(Protocol):
    """Applies functions to the rows of tensors, where row i of the result depends on row i of the arguments alone."""

    def apply(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function(*tensors)`, which may overwrite them."""
        ...

    def elementwise(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """The same for a function without sums, inside one that `apply` was given."""
        ...


class AllRows:
    """All rows at once."""

    @staticmethod
    def apply(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """See `Rows`."""
        return function(*tensors)

    elementwise = apply


class TiledRows:
    """`num_rows` rows at a time, the last ones filled up with zeros."""

    def __init__(self, num_rows: int = TILE_ROWS) -> None:
        self.num_rows = num_rows

    def apply(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """See `Rows`."""
        total, size = len(tensors[0]), self.num_rows
        num_left = total % size
        tiles = [function(*tile) for tile in _slices(tensors, size, total - num_left)]
        if num_left or not tiles:
            tiles.append(function(*(_last_tile(x, num_left, size) for x in tensors))[:num_left])
        return tiles[0] if len(tiles) == 1 else torch.cat(tiles)

    @staticmethod
    def elementwise(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """See `Rows`. So few rows at a time that torch leaves them to one thread.

        Threads may share a row between them, and its elements next to the cut are then computed by scalar instructions
        where others are computed by vector instructions, which round otherwise.
        """
        num_rows = max(1, (_SHARED_FROM - 1) // tensors[0][0].numel())
        if num_rows >= len(tensors[0]):
            return function(*tensors)
        return torch.cat([function(*part) for part in _slices(tensors, num_rows, len(tensors[0]))])


def keeps_places(function: Callable[..., Tensor], *tensors: Tensor) -> bool:
    """Whether a tile's rows keep their bits when they move to other places. `function` may overwrite its arguments.

    Calls it equally often whatever it finds: in it, ranks may be waiting for each other.
    """
    expected = function(*(x.clone() for x in tensors))
    shifts = (1, len(expected) // 2)
    moved = [function(*(x.roll(shift, 0) for x in tensors)) for shift in shifts]
    return all(torch.equal(result.roll(-shift, 0), expected) for result, shift in zip(moved, shifts, strict=True))


def _slices(tensors: tuple[Tensor, ...], size: int, end: int) -> list[list[Tensor]]:
    """The tensors' rows up to `end`, `size` at a time."""
    return [[x[start : start + size] for x in tensors] for start in range(0, end, size)]


def _last_tile(x: Tensor, num_left: int, size: int) -> Tensor:
    """The last `num_left` rows and zeros, `size` in all."""
    padding = [0, 0] * (x.dim() - 1) + [0, size - num_left]
    return functional.pad(x[len(x) - num_left :], padding)
