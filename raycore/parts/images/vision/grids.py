"""Where an image's patches are, and which of them attend to each other.

Patches are in the order of the blocks that become one embedding: all patches of a block, then those of the next one in
the same rows. Shape suffixes: P patches, W windows, L patches of a window.
"""

from __future__ import annotations

import torch
from torch import Tensor

Grid = tuple[int, int, int]
"""Frames, rows and columns of patches."""


def patch_positions(grid: Grid, merge_size: int) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each patch, both int64[P]. Blocks have `merge_size` rows and columns."""
    frames, num_rows, num_columns = grid
    rows_RC = torch.arange(num_rows)[:, None].expand(num_rows, num_columns)
    columns_RC = torch.arange(num_columns)[None].expand(num_rows, num_columns)
    blocks = num_rows // merge_size, merge_size, num_columns // merge_size, merge_size
    rows_P, columns_P = (each.reshape(blocks).transpose(1, 2).reshape(-1) for each in (rows_RC, columns_RC))
    return rows_P.repeat(frames), columns_P.repeat(frames)


def frame_windows(grid: Grid) -> list[Tensor]:
    """Return the patches of each frame, in groups of windows of equal size, [W, L]: there is one group."""
    return [torch.arange(grid[0] * grid[1] * grid[2]).view(grid[0], -1)]


def square_windows(grid: Grid, merge_size: int, window_size: int) -> list[Tensor]:
    """Return the patches of each square window, in groups of windows of equal size, [W, L].

    Args:
        window_size: rows and columns of a window, in blocks. Windows at the last rows and columns may have fewer.
    """
    rows_P, columns_P = patch_positions(grid, merge_size)
    frames_P = torch.arange(len(rows_P)) // (grid[1] * grid[2])
    side = window_size * merge_size
    num_columns = -(-grid[2] // side)
    window_P = (frames_P * -(-grid[1] // side) + rows_P // side) * num_columns + columns_P // side
    order_P = window_P.argsort(stable=True)
    sizes_W = window_P.bincount()
    starts_W = sizes_W.cumsum(0) - sizes_W
    groups: list[Tensor] = []
    for size in sorted({int(each) for each in sizes_W}):
        starts_G1 = starts_W[sizes_W == size][:, None]
        groups.append(order_P[starts_G1 + torch.arange(size)])
    return groups


def interpolate_positions(table_XD: Tensor, grid: Grid, merge_size: int) -> Tensor:
    """Return embeddings of positions [P, D] of an image's patches, between those of a square.

    Corners of the image have those of the square's corners. In between, the four nearest ones are mixed linearly.

    Args:
        table_XD: the embeddings of the square, row by row.
    """
    side = round(len(table_XD) ** 0.5)
    rows_P, columns_P = patch_positions(grid, merge_size)
    low_rows, high_rows, row_weights = _between(rows_P, grid[1], side)
    low_columns, high_columns, column_weights = _between(columns_P, grid[2], side)
    corners = [
        (low_rows, low_columns, (1 - row_weights) * (1 - column_weights)),
        (low_rows, high_columns, (1 - row_weights) * column_weights),
        (high_rows, low_columns, row_weights * (1 - column_weights)),
        (high_rows, high_columns, row_weights * column_weights),
    ]
    out_PD = torch.zeros(len(rows_P), table_XD.shape[1], device=table_XD.device)
    for rows, columns, weights_P in corners:
        index_P = (rows * side + columns).to(table_XD.device)
        out_PD += table_XD.index_select(0, index_P).float() * weights_P[:, None].to(table_XD.device)
    return out_PD.to(table_XD.dtype)


def _between(index_P: Tensor, size: int, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the positions of the square before and after each index of an axis of `size`, and the latter's weight."""
    place_P = index_P.float() * (side - 1) / max(size - 1, 1)
    low_P = place_P.floor()
    return low_P.long(), (low_P.long() + 1).clamp_(max=side - 1), place_P - low_P
