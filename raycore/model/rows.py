"""How the row-wise part of a step is split: all rows at once, or in tiles of one shape.

A matrix product's shape determines its kernel, blocking and threads, and with them the order in which a row's sums are
rounded. Tiles of one shape have one order. A row's bits may still depend on its place in the tile; `keeps_places` tests
this.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

TILE_ROWS = 16
"""A multiple of the rows that kernels process together. Every tile of a tensor starts on a 64-byte line."""
_SHARED_FROM = 1 << 15
"""Torch splits element-wise work of at least this many elements among threads."""


class Rows(Protocol):
    """Applies functions to the rows of tensors. Row i of the result depends on row i of the arguments alone."""

    def apply(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """`function(*tensors)`, which may overwrite them."""
        ...

    def elementwise(self, function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """The same for a function without sums, called within a function that `apply` runs."""
        ...


class AllRows:
    """All rows at once."""

    @staticmethod
    def apply(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """See `Rows`."""
        return function(*tensors)

    elementwise = apply


class TiledRows:
    """Tiles of `num_rows` rows; the last tile is padded with zeros."""

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
        """See `Rows`. Processes so few rows at a time that torch uses one thread.

        Several threads may share a row. Elements next to the cut are then computed by scalar instructions, which round
        differently from the vector instructions that compute the others.
        """
        num_rows = max(1, (_SHARED_FROM - 1) // tensors[0][0].numel())
        if num_rows >= len(tensors[0]):
            return function(*tensors)
        return torch.cat([function(*part) for part in _slices(tensors, num_rows, len(tensors[0]))])


def keeps_places(function: Callable[..., Tensor], *tensors: Tensor) -> bool:
    """Whether a tile's rows keep their bits when they move to other places. `function` may overwrite its arguments.

    The number of calls doesn't depend on the result: ranks may wait for each other in `function`.
    """
    expected = function(*(x.clone() for x in tensors))
    shifts = (1, len(expected) // 2)
    moved = [function(*(x.roll(shift, 0) for x in tensors)) for shift in shifts]
    return all(torch.equal(result.roll(-shift, 0), expected) for result, shift in zip(moved, shifts, strict=True))


def _slices(tensors: tuple[Tensor, ...], size: int, end: int) -> list[list[Tensor]]:
    """The tensors' rows up to `end`, `size` at a time."""
    return [[x[start : start + size] for x in tensors] for start in range(0, end, size)]


def _last_tile(x: Tensor, num_left: int, size: int) -> Tensor:
    """The last `num_left` rows, padded with zeros to `size` rows."""
    padding = [0, 0] * (x.dim() - 1) + [0, size - num_left]
    return functional.pad(x[len(x) - num_left :], padding)
