"""The sequences of a step as kernels for GPUs get them, for layers that keep a state.

Shape suffixes: n sequences, S saves, I tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

TILE_TOKENS = 8
"""Number of tokens that one program prepares, one after the other."""


@dataclass(slots=True, frozen=True)
class StateTables:
    """The sequences of a step, on the device: int32, contiguous. In the order of `state_tables`.

    Rows may be padding, for graphs: sequences without tokens, and tiles of those.
    """

    sequences_n4: Tensor
    """First token, number of tokens, row that is read, -1 for none, and row that is written."""
    tiles_I2: Tensor
    """For each tile of up to `TILE_TOKENS` tokens: the sequence, and the number of its tokens before the tile."""
    save_starts_m: Tensor
    """[n + 1]: the first save of each sequence, and the number of all saves."""
    saves_S2: Tensor
    """After how many tokens a state is saved, and in which row. Ordered by sequence, then by the number of tokens."""


def state_tables(sequences_n4: NDArray[np.int32], saves_S3: NDArray[np.int32]) -> list[NDArray[np.int32]]:
    """Return the tables of a step on the host. For the arguments see `raycore.state.spec.StateStep`."""
    counts_n = sequences_n4[:, 1].astype(np.int64)
    num_tiles_n = -(-counts_n // TILE_TOKENS)
    sequences_I = np.repeat(np.arange(len(counts_n)), num_tiles_n)
    tiles_I = np.arange(len(sequences_I)) - np.repeat(np.cumsum(num_tiles_n) - num_tiles_n, num_tiles_n)
    return [
        np.ascontiguousarray(sequences_n4, np.int32),
        np.stack([sequences_I, tiles_I * TILE_TOKENS], axis=1).astype(np.int32),
        np.searchsorted(saves_S3[:, 0], np.arange(len(counts_n) + 1)).astype(np.int32),
        np.ascontiguousarray(saves_S3[:, 1:], np.int32),
    ]
