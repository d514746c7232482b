"""Attention over a paged KV cache on GPUs.

`PagedAttention` launches three kernels. `write_cache` rotates queries and keys and stores keys and values.
`attend_tokens` serves decodes: one query token per row. `attend_chunks` serves prompts and chunks of prompts. All of
them read and write the cache where it lies. Launches depend on the shapes of their arguments only, never on values, so
that CUDA graphs can capture them.

This module doesn't know requests, steps or models.

Shape suffixes: T tokens, B decodes, O outputs of the fused projection (all query heads, then key heads, then value
heads), N query heads, K key-value heads, H elements of a head, X elements of all query heads (N · H), S slots (rows of
the block tables), M blocks of one slot, P positions, I tiles of queries.
"""

from __future__ import annotations

# Triton is untyped, and torch's tensors are partially typed:
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportCallIssue=false
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from raycore.kernels.gpu import attention_kernels as kernels
from raycore.kernels.gpu.bound_kernel import BoundKernel

_MAX_GROUP = 16
_MAX_HEAD_DIM = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MIN_DOT_SIZE = 16
"""The smallest matrices that tensor cores multiply have so many rows and columns."""
_MAX_SPLITS = 32
"""More splits of a row's keys would take longer to combine than they save."""
_INVARIANT_SPLITS = 8
"""Enough for few rows to use a large part of a GPU. With more, many rows would have many programs that find no keys."""
_PROGRAMS_PER_MULTIPROCESSOR = 4
"""As many as fit at a time, with a head dimension of 128 in 16 bits."""
_WRITER_WARPS = 2
"""A program rotates about 1,000 numbers."""
_TOKEN_WARPS = 4
"""They share the columns of 16 rows. More warps would only wait for memory."""
_STAGES = 3
"""While a tile is multiplied, the next one is loaded, and the block numbers of the one after."""


@dataclass(slots=True, frozen=True)
class LayerCache:
    """The cache of one layer, and what sets the layer's attention apart from that of others."""

    blocks: Tensor
    """Contiguous [blocks · 2 · K, block size · H]: row `(block · 2 + is_value) · K + head`. Of the model's dtype, or
    float8_e4m3fn."""
    turns_PH: Tensor
    """float32, contiguous: `Rope.cosines_and_sines()`."""
    window: int | None = None
    """How many tokens a token sees, itself included. None: all tokens up to its own."""
    norm_NH: Tensor | None = None
    """Weights of the RMS norms of the query heads, then the key heads: contiguous [N + K, H]. None: no norms."""
    sinks_N: Tensor | None = None
    """Contiguous: a logit of each query head that takes part in the softmax and has no value. None: no sinks."""
    num_owners: int = 1
    """Of every so many blocks of a sequence's tokens, the cache has one."""
    owner: int = 0
    """The index of that one."""


@dataclass(slots=True, frozen=True)
class TokenLocations:
    """By row, which sequence a token belongs to, and its position there. All tensors are contiguous."""

    slots_T: Tensor
    """int32: the sequence's row of the block tables. -1: a padding row, which is neither read nor stored."""
    positions_T: Tensor
    """int32 or int64, below P. Ignored for padding rows."""
    block_tables_SM: Tensor
    """int32: the blocks of each sequence."""
    turns_TH: Tensor | None = None
    """Like `LayerCache.turns_PH`, but of the rows, instead of positions. None: their positions rotate them."""

    def part(self, first: int, end: int) -> TokenLocations:
        """Return those of the rows from `first` to before `end`."""
        rows, turns_TH = slice(first, end), self.turns_TH
        turns_TH = None if turns_TH is None else turns_TH[rows]
        return TokenLocations(self.slots_T[rows], self.positions_T[rows], self.block_tables_SM, turns_TH)


def unsupported_reason(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> str | None:
    """Return why the kernels can't compute attention with these sizes. None: they can."""
    if num_heads % num_kv_heads or num_heads > _MAX_GROUP * num_kv_heads:
        return (
            f"{num_heads} query heads share {num_kv_heads} key-value heads: "
            f"the GPU kernels expect at most {_MAX_GROUP} for each, and equally many"
        )
    if head_dim % 2 or head_dim > _MAX_HEAD_DIM:
        return f"the head dimension is {head_dim}: the GPU kernels expect an even number up to {_MAX_HEAD_DIM}"
    if dtype not in _DTYPES:
        return f"the dtype is {dtype}: the GPU kernels expect float32, bfloat16 or float16"
    return None


def chunk_tiles(
    slots: NDArray[np.integer],
    first_rows: NDArray[np.integer],
    counts: NDArray[np.integer],
    starts: NDArray[np.integer],
    tile_rows: int,
) -> NDArray[np.int32]:
    """Return int32 [I, 4], the tiles of `attend_chunks`: slot, first row, number of rows, position of the first row.

    The arguments have one entry per chunk: its slot, its first row, its number of rows, and the position of its first
    row. `tile_rows` is `PagedAttention.tile_rows`. To pad the result, append zeros: a tile without rows does nothing.
    Tiles with the most keys come first, so that no long one is left for the end.
    """
    num_tiles = -(-counts // tile_rows)
    chunk_I = np.repeat(np.arange(len(counts)), num_tiles)
    offset_I = (np.arange(len(chunk_I)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile_rows
    tiles_I4 = np.stack(
        [
            slots[chunk_I],
            first_rows[chunk_I] + offset_I,
            np.minimum(counts[chunk_I] - offset_I, tile_rows),
            starts[chunk_I] + offset_I,
        ],
        axis=1,
    ).astype(np.int32)
    return tiles_I4[np.argsort(-tiles_I4[:, 3], kind="stable")]


class PagedAttention:
    """Launches the kernels for all layers of a model, and owns their workspace.

    Launches on one stream take turns with the workspace. Launches that may overlap need an object each.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        device: torch.device,
        scale: float,
        softcap: float | None = None,
        norm_eps: float,
        norm_offset: float = 0.0,
        dtype: torch.dtype,
        max_rows: int,
        batch_invariant: bool = False,
        num_multiprocessors: int | None = None,
    ) -> None:
        """Allocate the workspace on `device`.

        `scale`: scores are multiplied by it. `softcap`: then a score s becomes softcap·tanh(s / softcap).
        `norm_offset`: is added to the weights of norms. `dtype`: of queries, and of keys and values before they are
        stored. `max_rows`: the largest number of rows of `attend_tokens`. `batch_invariant`: make the bits of a row of
        `attend_tokens` independent of the number of rows. `num_multiprocessors`: None takes the device's. Raises
        ValueError if the kernels don't support the sizes.
        """
        if reason := unsupported_reason(num_heads, num_kv_heads, head_dim, dtype):
            raise ValueError(reason)
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._norm_eps = norm_eps
        self._norm_offset = norm_offset
        self._exponent_scale = math.log2(math.e) * (scale if softcap is None else softcap)
        self._cap_scale = None if softcap is None else scale / softcap
        self._batch_invariant = batch_invariant
        self._num_multiprocessors = num_multiprocessors or multiprocessors_of(device)
        self._tiles = _Tiles.of(head_dim, dtype)
        self._sizes = {
            "K": num_kv_heads,
            "G": self._group,
            "H": head_dim,
            "PADDED_H": max(triton.next_power_of_2(head_dim), _MIN_DOT_SIZE),
            "BLOCK_SIZE": block_size,
        }
        self._bound: dict[tuple[object, ...], BoundKernel] = {}
        """Kernels with their constants, by what these depend on."""
        self._max_rows = max_rows
        most_splits = max((rows * self.num_splits(rows) for rows in range(1, max_rows + 1)), default=0) * num_heads
        self._split_sums = torch.empty(most_splits * head_dim, device=device)
        self._split_tops = torch.empty(most_splits, device=device)
        self._split_totals = torch.empty(most_splits, device=device)
        self._splits_done = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)
        """By row and key-value head. Zeros between launches."""

    @property
    def tile_rows(self) -> int:
        """The largest number of tokens in a tile of `attend_chunks`."""
        return self._tiles.chunk_queries // self._group

    def num_splits(self, num_rows: int) -> int:
        """Return into how many splits `attend_tokens` divides each row's keys."""
        if self._batch_invariant:
            return _INVARIANT_SPLITS
        num_programs = _PROGRAMS_PER_MULTIPROCESSOR * self._num_multiprocessors
        return min(-(-num_programs // (num_rows * self._num_kv_heads)), _MAX_SPLITS)

    def write_cache(self, layer: LayerCache, qkv_TO: Tensor, locations: TokenLocations) -> None:
        """Normalize, if the model does, and rotate queries and keys in place, and store keys and values."""
        num_rows = len(qkv_TO)
        if not num_rows:
            return
        key = "write_cache", *_traits(layer), locations.turns_TH is None
        kernel = self._bound.get(key)
        if kernel is None:
            kernel = self._bound[key] = BoundKernel(
                kernels.write_cache,
                GROUP_ROWS=triton.next_power_of_2(self._group),
                num_warps=_WRITER_WARPS,
                **self._rotation_constants(layer, locations),
                **self._cache_constants(layer),
            )
        kernel(
            (num_rows * self._num_kv_heads, 1, 1),
            *_rows(layer, qkv_TO, locations.block_tables_SM),
            locations.slots_T,
            locations.positions_T,
            *self._rotation(layer, locations),
        )

    def attend_tokens(
        self,
        layer: LayerCache,
        qkv_BO: Tensor,
        locations: TokenLocations,
        out_BX: Tensor,
        *,
        is_fused: bool,
        logs_BN: Tensor | None = None,
    ) -> None:
        """Compute attention for one token of each sequence, into `out_BX`. Padding rows become zeros.

        `is_fused`: also do for these rows what `write_cache` does, except that `qkv_BO` isn't changed. Otherwise,
        `write_cache` must have been called for them, and `qkv_BO` may have the queries alone. `logs_BN`: float32,
        contiguous: gets the logarithms of the sums of weights. Then a row may see no key, and `out_BX` is in float32.
        """
        num_rows = len(qkv_BO)
        assert num_rows <= self._max_rows, f"{num_rows} rows, the workspace is for {self._max_rows}"
        if not num_rows:
            return
        key = "attend_tokens", *_traits(layer), locations.turns_TH is None, is_fused, logs_BN is None
        kernel = self._bound.get(key)
        if kernel is None:
            kernel = self._bound[key] = BoundKernel(
                kernels.attend_tokens,
                IS_FUSED=is_fused,
                ROWS=max(triton.next_power_of_2(self._group), _MIN_DOT_SIZE),
                num_warps=_TOKEN_WARPS,
                num_stages=_STAGES,
                **self._rotation_constants(layer, locations),
                **self._cache_constants(layer),
                **self._score_constants(layer, logs_BN),
            )
        kernel(
            (self._num_kv_heads, self.num_splits(num_rows), num_rows),
            *_rows(layer, qkv_BO, locations.block_tables_SM),
            locations.slots_T,
            locations.positions_T,
            *self._rotation(layer, locations),
            self._split_sums,
            self._split_tops,
            self._split_totals,
            self._splits_done,
            *self._scores(layer, out_BX, logs_BN),
        )

    def attend_chunks(
        self,
        layer: LayerCache,
        qkv_TO: Tensor,
        tiles_I4: Tensor,
        block_tables_SM: Tensor,
        out_TX: Tensor,
        ends_T: Tensor | None = None,
        logs_TN: Tensor | None = None,
    ) -> None:
        """Compute attention for the rows in tiles, into the same rows of `out_TX`. Other rows are left as they are.

        `write_cache` must have been called for these rows, and for those of the keys that they see.

        Args:
            tiles_I4: int32, contiguous, made by `chunk_tiles`.
            ends_T: int32: how many of its sequence's first tokens each row sees. None: all up to itself.
            logs_TN: as in `attend_tokens`.
        """
        num_tiles = len(tiles_I4)
        if not num_tiles:
            return
        key = "attend_chunks", *_traits(layer), ends_T is None, logs_TN is None
        kernel = self._bound.get(key)
        if kernel is None:
            kernel = self._bound[key] = BoundKernel(
                kernels.attend_chunks,
                HAS_ENDS=ends_T is not None,
                ROWS=self._tiles.chunk_queries,
                num_warps=self._tiles.chunk_warps,
                num_stages=_STAGES,
                **self._cache_constants(layer),
                **self._score_constants(layer, logs_TN),
            )
        kernel(
            (self._num_kv_heads, num_tiles, 1),
            *_rows(layer, qkv_TO, block_tables_SM),
            tiles_I4,
            ends_T,
            *self._scores(layer, out_TX, logs_TN),
        )

    def _cache_constants(self, layer: LayerCache) -> dict[str, Any]:
        return {"OWNERS": layer.num_owners, "OWNER": layer.owner, **self._sizes}

    def _rotation_constants(self, layer: LayerCache, locations: TokenLocations) -> dict[str, Any]:
        return {
            "HAS_NORM": layer.norm_NH is not None,
            "NORM_OFFSET": self._norm_offset,
            "TURNS_ARE_OF_ROWS": locations.turns_TH is not None,
        }

    def _rotation(self, layer: LayerCache, locations: TokenLocations) -> tuple[Any, ...]:
        turns_TH = locations.turns_TH
        return layer.norm_NH, layer.turns_PH if turns_TH is None else turns_TH, self._norm_eps

    def _score_constants(self, layer: LayerCache, logs_TN: Tensor | None) -> dict[str, Any]:
        return {
            "WINDOW": layer.window or 0,
            "HAS_SINKS": layer.sinks_N is not None,
            "IS_CAPPED": self._cap_scale is not None,
            "IS_PART": logs_TN is not None,
            "TILE": self._tiles.keys,
        }

    def _scores(self, layer: LayerCache, out_TX: Tensor, logs_TN: Tensor | None) -> tuple[Any, ...]:
        logs = self._split_tops if logs_TN is None else logs_TN
        return out_TX, out_TX.stride(0), logs, layer.sinks_N, self._exponent_scale, self._cap_scale


def _rows(layer: LayerCache, qkv_TO: Tensor, block_tables_SM: Tensor) -> tuple[Any, ...]:
    return qkv_TO, qkv_TO.stride(0), layer.blocks, block_tables_SM, block_tables_SM.stride(0)


def _traits(layer: LayerCache) -> tuple[object, ...]:
    """Return what of a layer is constant in kernels."""
    return layer.window, layer.norm_NH is None, layer.sinks_N is None, layer.num_owners, layer.owner


def multiprocessors_of(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@dataclass(slots=True, frozen=True)
class _Tiles:
    """Sizes of tiles that fit in the registers and the shared memory of an A100 or H100."""

    keys: int
    chunk_queries: int
    """Rows of a program of `attend_chunks`: queries of adjacent tokens that share a key-value head."""
    chunk_warps: int

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype) -> _Tiles:
        head_bytes = triton.next_power_of_2(head_dim) * dtype.itemsize
        keys = 64 if head_bytes <= 512 else 32
        if dtype == torch.float32:
            # tensor cores would round float32, so it is multiplied in registers, which hold smaller tiles
            return cls(keys, chunk_queries=16, chunk_warps=4)
        if head_dim > 128:
            # the sums of 64 queries take half of the registers of four warps
            return cls(keys, chunk_queries=64, chunk_warps=4)
        # Hopper's tensor cores multiply 64 rows for a group of four warps; two groups share the tiles of keys
        return cls(keys, chunk_queries=128, chunk_warps=8)
