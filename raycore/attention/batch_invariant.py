"""Batch-invariant attention: a token's result depends, bit for bit, only on the tokens of its sequence up to this
token.

The unit of work is a *tile*: `TILE` consecutive positions of one slot, starting at a multiple of `TILE`. The step may
compute all of them or only some. A token's row in its tile is its position modulo `TILE`. So a decode has the same row
that it would have in a prompt, however the prompt is divided into chunks. A tile reads keys in whole stretches of about
`STRETCH` tokens, until its own positions are included. Keys that a token must not see are masked. Rows that the step
doesn't compute have arbitrary values, and their results are dropped.

One call of SDPA (scaled dot-product attention) computes a group of tiles that have equally many keys: either tiles of
one slot that read the same keys, or one tile of each of several slots. In the call, every tile and head is a separate
matrix, so the number of tiles doesn't change any result. Where a model has what SDPA doesn't know, `ExplicitAttention`
computes one tile at a time, because torch's batched matrix products promise no such thing.

Shape suffixes: T tokens, I tiles, Q rows of a tile, K key-value heads, G query heads for each of those, H elements of a
head, L keys of a tile.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from raycore.attention.cache_writer import CacheWriter
from raycore.attention.explicit import ExplicitAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.scratch import GatherScratch
from raycore.attention.spec import AttentionSpec
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors

TILE = 4
"""Number of positions in a tile. A decode computes all rows of its tile to get one of them; a prompt uses all rows.

Measured: with 8, decodes of 16 requests took a fifth longer, and nothing was faster.
"""
STRETCH = 128
"""Keys are read in units of this many tokens, rounded up; see `_stretch`."""


class BatchInvariantAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, spec: AttentionSpec, kv: KVTensors, scratch: GatherScratch) -> None:
        self.heads = spec.heads
        self.scale = spec.scale
        self.kv = kv
        self.scratch = scratch
        self.dtype = spec.dtype
        self.device = spec.device
        self.stretch = _stretch(kv.block_size)
        self.explicit = ExplicitAttention.of_layers(spec)
        self._windows = spec.windows
        self._writer = CacheWriter(spec, kv, batch_invariant=True)
        self._made_for: tuple[bytes, bytes, int] | None = None
        self._passes = {window: _Pass(self, window) for window in set(spec.windows)}

    @staticmethod
    def max_blocks(max_model_len: int, block_size: int) -> int:
        """Maximum number of blocks gathered for one request: whole stretches for `max_model_len` tokens plus one."""
        stretch = _stretch(block_size)
        return (max_model_len // stretch + 1) * stretch // block_size

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._writer.begin(step, tensors)
        block_tables = step.block_tables
        tiles_T = step.positions // TILE
        is_first_T = np.ones(len(tiles_T), np.bool_)
        is_first_T[1:] = (np.diff(tiles_T) != 0) | (np.diff(step.token_slots) != 0)
        slots_I, tiles_I = step.token_slots[is_first_T], tiles_T[is_first_T]
        made_for = (slots_I.tobytes(), tiles_I.tobytes(), step.tables_version)
        for each in self._passes.values():
            if made_for != self._made_for:
                each.group(slots_I, tiles_I, block_tables)
            each.map_tokens(np.cumsum(is_first_T) - 1, step.positions % TILE)
        self._made_for = made_for

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        self._writer(layer, qkv_TO)
        return self._passes[self._windows[layer]].attend(self.kv.blocks[layer], qkv_TO, self.explicit[layer])

    def to_device(self, values: NDArray[np.generic]) -> Tensor:
        """`values` as a tensor on the model's device."""
        return to_device(values, self.device)


def _stretch(block_size: int) -> int:
    """Return `STRETCH`, rounded up to a multiple of the block size and of `TILE`."""
    unit = math.lcm(block_size, TILE)
    return -(-STRETCH // unit) * unit


class _Pass:
    """A step's tiles, in groups, for all layers with the same sliding window."""

    def __init__(self, attention: BatchInvariantAttention, window: int | None) -> None:
        self._attention = attention
        self._window = window
        self._groups: list[_Group] = []
        self._order = np.empty(0, np.int64)
        """The tiles' indexes, in the order in which the groups contain the tiles."""
        self._q_rows = self._out_rows = torch.empty(0)

    def group(self, slots_I: Ints, tiles_I: Ints, block_tables: NDArray[np.int32]) -> None:
        """Divide the tiles into groups, one for each call of SDPA, and determine the keys that each group reads."""
        stretch, starts_I = self._attention.stretch, tiles_I * TILE
        first_I = np.zeros_like(starts_I)
        if self._window is not None:
            first_I = np.maximum(starts_I - self._window + 1, 0) // stretch * stretch
        num_keys_I = (starts_I // stretch + 1) * stretch - first_I
        # for types narrower than float32, torch's CPU kernel repacks the keys depending on the number of tiles
        is_alone = self._attention.device.type == "cpu" and self._attention.dtype != torch.float32
        is_alone |= any(each is not None for each in self._attention.explicit)
        num_blocks_I = num_keys_I // self._attention.kv.block_size
        groups = [
            part
            for group in _groups(slots_I, first_I, num_keys_I, is_alone)
            for part in _that_fit(
                group, _is_shared(slots_I[group], first_I[group]), num_blocks_I, self._attention.scratch.num_blocks
            )
        ]
        self._order = np.concatenate(groups)
        self._groups = [
            _Group(
                self._attention, slots_I[g], starts_I[g], first_I[g], int(num_keys_I[g[0]]), self._window, block_tables
            )
            for g in groups
        ]

    def map_tokens(self, tile_of_T: Ints, row_T: Ints) -> None:
        """Map the step's tokens to rows of the tiles: token t is row `row_T[t]` of tile `tile_of_T[t]`."""
        heads = self._attention.heads
        row_IQ = np.zeros((len(self._order), TILE), np.int64)  # token 0 in rows for which the step has no token
        row_IQ[tile_of_T, row_T] = np.arange(len(tile_of_T))
        head_KG = np.arange(heads.num_kv_heads)[:, None] * heads.group + np.arange(heads.group)
        heads_per_row = heads.num_heads + 2 * heads.num_kv_heads
        q_rows_IKGQ = row_IQ[self._order, None, None] * heads_per_row + head_KG[:, :, None]
        self._q_rows = self._attention.to_device(q_rows_IKGQ.ravel())
        order_I = np.empty_like(self._order)
        order_I[self._order] = np.arange(len(self._order))
        head_K1, head_1G = np.arange(heads.num_kv_heads)[:, None], np.arange(heads.group)
        row_T11, first_T11 = row_T[:, None, None], order_I[tile_of_T, None, None] * heads.group
        out_rows_TKG = ((first_T11 + head_1G) * TILE + row_T11) * heads.num_kv_heads + head_K1
        self._out_rows = self._attention.to_device(out_rows_TKG.ravel())

    def attend(self, blocks: Tensor, qkv_TO: Tensor, explicit: ExplicitAttention | None) -> Tensor:
        """Compute attention for the step's tokens in one layer. Returns [T, query heads · H]."""
        heads = self._attention.heads
        q_rows = qkv_TO.view(-1, heads.head_dim).index_select(0, self._q_rows)
        q_IKRH = q_rows.view(-1, heads.num_kv_heads, heads.group * TILE, heads.head_dim)
        parts: list[Tensor] = []
        first = 0
        for group in self._groups:
            parts.append(group.attend(blocks, q_IKRH[first : first + group.num_tiles], explicit))
            first += group.num_tiles
        out_rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out_rows.index_select(0, self._out_rows).view(len(qkv_TO), -1)


def _groups(slots_I: Ints, first_I: Ints, num_keys_I: Ints, is_alone: bool) -> list[Ints]:
    """Return groups of tiles: those of one slot that read the same keys, and single tiles that read equally many keys.

    With `is_alone`, every tile is a group of its own.
    """
    if is_alone:
        return list(np.arange(len(slots_I))[:, None])
    is_new = (np.diff(slots_I) != 0) | (np.diff(first_I) != 0) | (np.diff(num_keys_I) != 0)
    runs = np.split(np.arange(len(slots_I)), np.flatnonzero(is_new) + 1)
    single = np.array([run[0] for run in runs if len(run) == 1], np.int64)
    together = [single[num_keys_I[single] == num_keys] for num_keys in np.unique(num_keys_I[single])]
    return [*together, *(run for run in runs if len(run) > 1)]


def _is_shared(slots_I: Ints, first_I: Ints) -> bool:
    """Whether the tiles of a group read the same keys. If so, these keys are gathered only once for all tiles."""
    return len(slots_I) > 1 and bool(slots_I[0] == slots_I[1] and first_I[0] == first_I[1])


def _that_fit(group: Ints, is_shared: bool, num_blocks_I: Ints, capacity: int) -> list[Ints]:
    """Return the group, split into parts whose keys and values fit into `capacity` blocks."""
    if is_shared:
        return [group]
    size = capacity // int(num_blocks_I[group[0]])
    return [group[start : start + size] for start in range(0, len(group), size)]


class _Group:
    """Tiles with equally many keys, computed by one call of SDPA. `ExplicitAttention` gets only one tile."""

    def __init__(
        self,
        attention: BatchInvariantAttention,
        slots_I: Ints,
        starts_I: Ints,
        first_I: Ints,
        num_keys: int,
        window: int | None,
        block_tables: NDArray[np.int32],
    ) -> None:
        self.num_tiles = len(slots_I)
        self._heads = attention.heads
        self._scale = attention.scale
        block_size = attention.kv.block_size
        readers = slice(0, 1 if _is_shared(slots_I, first_I) else self.num_tiles)
        # stretches may reach beyond the table, where all keys are masked
        columns = first_I[readers, None] // block_size + np.arange(num_keys // block_size)
        columns = np.minimum(columns, block_tables.shape[1] - 1)
        block_ids = block_tables[slots_I[readers, None], columns]
        self._gather_rows = attention.to_device(attention.kv.gather_rows(block_ids))
        self._gathered = attention.scratch.rows(len(self._gather_rows))
        keys_I1L = (first_I[:, None] + np.arange(num_keys))[:, None]
        queries_IQ1 = (starts_I[:, None] + np.arange(TILE))[:, :, None]
        is_seen_IQL = keys_I1L <= queries_IQ1
        if window is not None:
            is_seen_IQL &= keys_I1L > queries_IQ1 - window
        mask = torch.zeros(is_seen_IQL.shape, dtype=attention.dtype, device=attention.device)
        self._mask_I1QL = mask.masked_fill_(attention.to_device(~is_seen_IQL), -torch.inf).unsqueeze(1)

    def attend(self, blocks: Tensor, q_IKRH: Tensor, explicit: ExplicitAttention | None) -> Tensor:
        """Compute attention for the group's tiles. Returns [I·R·K, H], where R is G·Q."""
        heads = self._heads
        shape = (2, -1, heads.num_kv_heads, self._mask_I1QL.shape[-1], heads.head_dim)
        torch.index_select(blocks, 0, self._gather_rows, out=self._gathered)
        kv_2IKLH = self._gathered.view(shape)
        if explicit is not None:
            q_KGQH = q_IKRH[0].view(heads.num_kv_heads, heads.group, TILE, heads.head_dim)
            keys_KLH, values_KLH = kv_2IKLH[:, 0].unbind()
            out_KGQH = explicit(q_KGQH, keys_KLH, values_KLH, self._mask_I1QL[0])
            return out_KGQH.flatten(1, 2).transpose(0, 1).reshape(-1, heads.head_dim)
        keys, values = kv_2IKLH.expand(-1, self.num_tiles, -1, -1, -1).unbind()
        mask = self._mask_I1QL if heads.group == 1 else self._mask_I1QL.repeat(1, 1, heads.group, 1)
        out_IKRH = functional.scaled_dot_product_attention(q_IKRH, keys, values, attn_mask=mask, scale=self._scale)
        return out_IKRH.transpose(1, 2).reshape(-1, heads.head_dim)
