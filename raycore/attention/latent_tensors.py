"""The cache of latent attention: a pool of blocks for each layer, whose tokens have one latent and one rotated key.

This module defines the layout `[num_blocks, block_size, width]`, where a token's latent comes before its rotated key.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.attention.kv_tensors import zeros


class LatentTensors:
    """Latents and rotated keys of all layers. Shapes: N blocks, S block size, W elements of a token."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        width: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        memory: Sequence[Tensor] | None = None,
        beside: Sequence[Tensor | None] = (),
    ) -> None:
        """As that of `KVTensors`. `beside`: by layer, the memory of what it keeps of the same tokens, too."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        if memory is None:
            memory = zeros((num_layers, num_blocks * block_size * width), dtype, device).unbind()
        self.blocks = [layer.view(-1, block_size * width) for layer in memory]
        """By layer, a view [N, S·W]. Attention gathers rows of this view."""
        self.rows = [layer.view(-1, width) for layer in self.blocks]
        """By layer, a view [N·S, W] of the same memory: one row for each token."""
        self.beside = [None if layer is None else layer.view(num_blocks * block_size, -1) for layer in beside]
        """By layer, a view [N·S, X]: what it keeps of the same tokens beside. None: nothing."""

    @staticmethod
    def bytes_per_block(num_layers: int, width: int, block_size: int, dtype: torch.dtype) -> int:
        """Return how many bytes one block takes over all layers."""
        return num_layers * block_size * width * dtype.itemsize

    def write_rows(self, block_ids_T: NDArray[np.integer], positions_T: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return int64[T]: for each token, its index in `rows`."""
        return token_rows(block_ids_T, positions_T, self.block_size)


def token_rows(
    block_ids_T: NDArray[np.integer], positions_T: NDArray[np.integer], block_size: int
) -> NDArray[np.int64]:
    """Return int64[T]: the rows of tokens in memory with one row for each token of a block."""
    return block_ids_T.astype(np.int64) * block_size + positions_T % block_size
