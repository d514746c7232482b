"""Latent attention over a paged cache on GPUs.

`LatentAttentionKernels` launches the kernels, which read and write the cache where it lies. `prepare` normalizes,
rotates and stores. `attend_tokens` serves decodes: one query token per row. `attend_chunks` serves prompts and chunks
of prompts. Launches depend on the shapes of their arguments only, never on values, so that CUDA graphs can capture
them.

Shape suffixes: T tokens, B decodes, N query heads, W elements of a query or of a key, R those of a latent, P the
rotated ones, X numbers of a token, I tiles of tokens.
"""

from __future__ import annotations

# Triton is untyped, and torch's tensors are partially typed:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from raycore.kernels.gpu import latent_kernels as kernels
from raycore.kernels.gpu.attention import TokenLocations, multiprocessors_of
from raycore.kernels.gpu.bound_kernel import bound

_MAX_RANK = 512
_MAX_ROTATED = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_DOT_SIZE = 16
"""The smallest matrices that tensor cores multiply have so many rows and columns."""
_TILE_KEYS = 32
_MAX_SPLITS = 32
"""More splits of a token's keys would take longer to combine than they save."""
_PROGRAMS_PER_MULTIPROCESSOR = 2
_CHUNK_TOKENS = 16
"""Of a tile."""
_WRITTEN_HEADS = 16
"""Heads that are rotated together."""


@dataclass(slots=True, frozen=True)
class LatentLayer:
    """The cache of one layer, and what sets the layer apart from others."""

    rows_XW: Tensor
    """Contiguous [blocks · block size, W]."""
    turns_PX: Tensor
    """float32, contiguous: `Rope.cosines_and_sines()`."""
    norm_R: Tensor
    """Contiguous: weights of the norm of latents."""


def unsupported_latents(rank: int, num_rotated: int, dtype: torch.dtype) -> str | None:
    """Return why the kernels can't compute latent attention with these sizes. None: they can."""
    if rank > _MAX_RANK or num_rotated > _MAX_ROTATED or rank % 2 or num_rotated % 2:
        return (
            f"kv_lora_rank={rank} with {num_rotated} rotated elements: the GPU kernels expect even numbers up to "
            f"{_MAX_RANK} and {_MAX_ROTATED}"
        )
    if dtype not in _DTYPES:
        return f"the dtype is {dtype}: the GPU kernels expect float32, bfloat16 or float16"
    return None


class LatentAttentionKernels:
    """Launches the kernels for all layers of a model, and owns their workspace."""

    tile_tokens = _CHUNK_TOKENS
    """The largest number of tokens in a tile of `attend_chunks`."""

    def __init__(
        self,
        *,
        num_heads: int,
        rank: int,
        width: int,
        block_size: int,
        device: torch.device,
        scale: float,
        norm_eps: float,
        dtype: torch.dtype,
        max_rows: int,
        batch_invariant: bool = False,
        num_multiprocessors: int | None = None,
    ) -> None:
        """Allocate the workspace on `device`.

        Args:
            rank: size of a latent.
            width: size of a query or of a key.
            scale: scores are multiplied by it.
            max_rows: the largest number of rows of `attend_tokens`.
            batch_invariant: make the bits of a row of `attend_tokens` independent of the number of rows.
            num_multiprocessors: None takes the device's.

        Raises:
            ValueError: the kernels don't support the sizes.
        """
        if reason := unsupported_latents(rank, width - rank, dtype):
            raise ValueError(reason)
        self._num_heads, self._rank, self._max_rows = num_heads, rank, max_rows
        self._norm_eps = norm_eps
        self._exponent_scale = math.log2(math.e) * scale
        self._batch_invariant = batch_invariant
        self._num_multiprocessors = num_multiprocessors or multiprocessors_of(device)
        # tensor cores would round float32, so it is multiplied in registers, which hold smaller tiles
        self._chunk_queries = 16 if dtype == torch.float32 else 32
        self._sizes = {
            "N": num_heads,
            "R": rank,
            "PADDED_R": max(triton.next_power_of_2(rank), _MIN_DOT_SIZE),
            "P": width - rank,
            "PADDED_P": max(triton.next_power_of_2(width - rank), _MIN_DOT_SIZE),
            "BLOCK_SIZE": block_size,
        }
        # rows that aren't divided need no workspace
        divided = [rows for rows in range(1, max_rows + 1) if self.num_splits(rows) > 1]
        most = max((rows * self.num_splits(rows) for rows in divided), default=0) * num_heads
        self._split_sums = torch.empty(most * rank, device=device)
        self._split_tops = torch.empty(most, device=device)
        self._split_totals = torch.empty(most, device=device)

    def num_splits(self, num_rows: int) -> int:
        """Return into how many splits `attend_tokens` divides each row's keys."""
        if self._batch_invariant:
            return 1
        num_programs = _PROGRAMS_PER_MULTIPROCESSOR * self._num_multiprocessors
        return min(-(-num_programs // (num_rows * self._head_tiles)), _MAX_SPLITS)

    @property
    def _head_tiles(self) -> int:
        return -(-self._num_heads // _MIN_DOT_SIZE)

    def prepare(self, layer: LatentLayer, fused_TX: Tensor, locations: TokenLocations) -> None:
        """Normalize and store latents, and rotate queries, in place, and keys, which are stored, too."""
        if not len(fused_TX):
            return
        kernel = bound(kernels.prepare_latents, HEADS=_WRITTEN_HEADS, num_warps=4, **self._sizes)
        kernel(
            (len(fused_TX), 1, 1),
            *_rows(layer, fused_TX, locations.block_tables_SM),
            locations.slots_T,
            locations.positions_T,
            layer.norm_R,
            layer.turns_PX,
            self._norm_eps,
        )

    def attend_tokens(self, layer: LatentLayer, fused_BX: Tensor, locations: TokenLocations, out_BX: Tensor) -> None:
        """Compute attention for one token of each sequence, into `out_BX`. Padding rows become zeros.

        `prepare` must have been called for these rows.
        """
        num_rows = len(fused_BX)
        assert num_rows <= self._max_rows, f"{num_rows} rows, the workspace is for {self._max_rows}"
        if not num_rows:
            return
        num_splits = self.num_splits(num_rows)
        of_splits = self._split_sums, self._split_tops, self._split_totals, out_BX, out_BX.stride(0)
        options = {"Q": _MIN_DOT_SIZE, "TILE": _TILE_KEYS, "num_warps": 4, "num_stages": 2}
        kernel = bound(kernels.attend_tokens, SPLITS=num_splits, **options, **self._sizes)
        kernel(
            (self._head_tiles, num_splits, num_rows),
            *_rows(layer, fused_BX, locations.block_tables_SM),
            locations.slots_T,
            locations.positions_T,
            *of_splits,
            self._exponent_scale,
        )
        if num_splits > 1:
            sizes = {name: self._sizes[name] for name in ("N", "R", "PADDED_R")}
            kernel = bound(kernels.combine_splits, SPLITS=num_splits, num_warps=4, **sizes)
            kernel((num_rows * self._num_heads, 1, 1), locations.slots_T, *of_splits)

    def attend_chunks(
        self, layer: LatentLayer, fused_TX: Tensor, tiles_I4: Tensor, block_tables_SM: Tensor, out_TX: Tensor
    ) -> None:
        """Compute attention for the rows in tiles, into the same rows of `out_TX`. Other rows are left as they are.

        `tiles_I4`: int32, contiguous, made by `chunk_tiles`. `prepare` must have been called for these rows.
        """
        if not len(tiles_I4):
            return
        options = {"Q": self._chunk_queries, "TILE": _TILE_KEYS, "num_warps": 8, "num_stages": 2}
        kernel = bound(kernels.attend_chunks, **options, **self._sizes)
        kernel(
            (-(-_CHUNK_TOKENS * self._num_heads // self._chunk_queries), len(tiles_I4), 1),
            *_rows(layer, fused_TX, block_tables_SM),
            tiles_I4,
            out_TX,
            out_TX.stride(0),
            self._exponent_scale,
        )


def _rows(layer: LatentLayer, fused_TX: Tensor, block_tables_SM: Tensor) -> tuple[Any, ...]:
    return fused_TX, fused_TX.stride(0), layer.rows_XW, block_tables_SM, block_tables_SM.stride(0)
