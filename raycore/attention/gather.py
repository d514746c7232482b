"""Attention over a paged KV cache in plain torch: gathers the blocks, then computes dense attention.

A step has two kinds of tokens. *Decodes*, one token per slot, are computed together, with batched matrix products over
sequences and heads. *Chunks* of prompts are computed by SDPA (scaled dot-product attention), one chunk per call, except
that adjacent chunks of equal length that begin their prompts share a call. Where a model has what SDPA doesn't know,
`ExplicitAttention` computes both. Row indexes and masks are made once per step, not for each layer.

Shape suffixes: T tokens, B decodes, K key-value heads, G query heads for each of those, H elements of a head, M blocks
of one sequence, L keys in these blocks.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from raycore.attention.cache_writer import CacheWriter
from raycore.attention.explicit import ExplicitAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.scratch import GatherScratch, groups_that_fit
from raycore.attention.spec import AttentionSpec
from raycore.models.mixers.spec import HeadShape
from raycore.step.batch import StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors


class GatherAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, spec: AttentionSpec, kv: KVTensors, scratch: GatherScratch) -> None:
        self.scratch = scratch
        self._heads = spec.heads
        self.scale = spec.scale
        self._windows = spec.windows
        self._kv = kv
        self._dtype = spec.dtype
        self._device = spec.device
        self._explicit = ExplicitAttention.of_layers(spec)
        self._writer = CacheWriter(spec, kv)
        self._num_decodes = 0
        self._decodes = {window: _Decodes(self, window) for window in set(spec.windows)}
        self._chunks: dict[int | None, list[_Chunk]] = {}

    @staticmethod
    def max_blocks(max_model_len: int, block_size: int) -> int:
        """Maximum number of blocks gathered for one request. One token may be sampled beyond the longest sequence."""
        return -(-(max_model_len + 1) // block_size)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._writer.begin(step, tensors)
        block_tables = step.block_tables
        self._num_decodes = step.num_decodes
        if step.num_decodes:
            for decodes in self._decodes.values():
                decodes.begin(step, block_tables)
        self._chunks = {}
        if step.num_decodes < len(step.slots):
            self._chunks = {window: self._make_chunks(step, block_tables, window) for window in self._decodes}

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        self._writer(layer, qkv_TO)
        blocks, window, explicit = self._kv.blocks[layer], self._windows[layer], self._explicit[layer]
        if not self._chunks:
            return self._decodes[window].attend(blocks, qkv_TO, explicit)
        parts = [chunk.attend(blocks, qkv_TO, explicit) for chunk in self._chunks[window]]
        if self._num_decodes:
            parts.insert(0, self._decodes[window].attend(blocks, qkv_TO[: self._num_decodes], explicit))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _make_chunks(self, step: StepInputs, block_tables: NDArray[np.int32], window: int | None) -> list[_Chunk]:
        chunks: list[_Chunk] = []
        row = step.num_decodes
        for index in range(step.num_decodes, len(step.slots)):
            count, start = int(step.counts[index]), int(step.starts[index])
            ends_T = _ends(step, row, count)
            is_plain = start == 0 and (window is None or count <= window) and ends_T is None
            last = chunks[-1] if chunks else None
            if is_plain and isinstance(last, WholePrompts) and last.count == count:
                last.num_prompts += 1
            elif is_plain:
                chunks.append(WholePrompts(self.heads, self.scale, row, count))
            else:
                table = block_tables[int(step.slots[index])]
                chunks.append(_LaterChunk(self, row, count, start, table, window, ends_T))
            row += count
        return chunks

    @property
    def heads(self) -> HeadShape:
        return self._heads

    @property
    def kv(self) -> KVTensors:
        return self._kv

    def to_device(self, values: NDArray[np.generic]) -> Tensor:
        """`values` as a tensor on the model's device."""
        return to_device(values, self._device)

    def additive_mask(self, is_seen: NDArray[np.bool_]) -> Tensor:
        """Return a mask to add to attention scores: 0 where `is_seen`, minus infinity elsewhere."""
        mask = torch.zeros(is_seen.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(self.to_device(~is_seen), -torch.inf)


def _ends(step: StepInputs, row: int, count: int) -> NDArray[np.int32] | None:
    """Return how many tokens each of a slot's tokens sees. None: all see those up to themselves."""
    if step.features is None or step.features.ends is None:
        return None
    ends_T = step.features.ends[row : row + count]
    return None if (ends_T == step.positions[row : row + count] + 1).all() else ends_T


def _first_block(positions: NDArray[np.int64], window: int | None, block_size: int) -> NDArray[np.int64]:
    """Return, for each position, the index of the first block with a key that the token at this position sees."""
    if window is None:
        return np.zeros_like(positions)
    return np.maximum(positions - window + 1, 0) // block_size


class _Decodes:
    """The decodes of a step, in groups, for all layers with the same sliding window."""

    def __init__(self, attention: GatherAttention, window: int | None) -> None:
        self._attention = attention
        self._window = window
        self._made_for: tuple[bytes, bytes, int] | None = None
        self._groups: list[_DecodeGroup] = []
        self._order = self._inverse_order = torch.empty(0)
        """The order of the decodes in the groups, and its inverse. Unused if there is only one group."""

    def begin(self, step: StepInputs, block_tables: NDArray[np.int32]) -> None:
        slots_B, positions_B = step.slots[: step.num_decodes], step.starts[: step.num_decodes]
        block_size = self._attention.kv.block_size
        first_B = _first_block(positions_B, self._window, block_size)
        num_blocks_B = positions_B // block_size - first_B + 1
        made_for = (slots_B.tobytes() + first_B.tobytes(), num_blocks_B.tobytes(), step.tables_version)
        if made_for != self._made_for:
            self._made_for = made_for
            self._group(block_tables[slots_B], first_B, num_blocks_B)
        for group in self._groups:
            group.begin(positions_B - first_B * block_size)

    def attend(self, blocks: Tensor, qkv_BO: Tensor, explicit: ExplicitAttention | None) -> Tensor:
        """Compute attention for the decodes in one layer. Returns [B, query heads · H]."""
        heads = self._attention.heads
        q_BO = qkv_BO[:, : heads.num_heads * heads.head_dim]
        if len(self._groups) == 1:
            return self._groups[0].attend(blocks, q_BO, explicit)
        q_BO = q_BO.index_select(0, self._order)
        parts: list[Tensor] = []
        first = 0
        for group in self._groups:
            parts.append(group.attend(blocks, q_BO[first : first + len(group.members)], explicit))
            first += len(group.members)
        out_BO = torch.cat(parts)
        return out_BO.index_select(0, self._inverse_order)

    def _group(self, tables_BM: NDArray[np.int32], first_B: NDArray[np.int64], num_blocks_B: NDArray[np.int64]) -> None:
        members = groups_that_fit(num_blocks_B, self._attention.scratch.num_blocks)
        self._groups = [
            _DecodeGroup(
                self._attention, self._window, each, tables_BM[each], first_B[each], int(num_blocks_B[each].max())
            )
            for each in members
        ]
        order = np.concatenate(members)
        self._order = self._attention.to_device(order)
        self._inverse_order = self._attention.to_device(np.argsort(order))


class _DecodeGroup:
    """Decodes whose keys and values are gathered together, padded to the longest sequence. In shapes, P is B · K."""

    def __init__(
        self,
        attention: GatherAttention,
        window: int | None,
        members: NDArray[np.int64],
        tables_BM: NDArray[np.int32],
        first_B: NDArray[np.int64],
        num_blocks: int,
    ) -> None:
        """`members` are indexes of decodes in the step. The other arrays have only the rows of these decodes."""
        self.members = members
        self._attention = attention
        self._window = window
        columns_BM = np.minimum(first_B[:, None] + np.arange(num_blocks), tables_BM.shape[1] - 1)
        block_ids_BM = np.take_along_axis(tables_BM, columns_BM, 1)
        self._gather_rows = attention.to_device(attention.kv.gather_rows(block_ids_BM))
        self._gathered = attention.scratch.rows(len(self._gather_rows))
        self._keys_PHL = self._values_PLH = self._gathered
        """Views of `_gathered`."""
        self._mask: Tensor | None = None
        self._scale = attention.scale

    def begin(self, last_B: NDArray[np.int64]) -> None:
        """Prepare for a step.

        `last_B`: for every decode of the step, also of other groups, the index of the decode's own key among the keys
        that are gathered for it.
        """
        heads = self._attention.heads
        last_B = last_B[self.members]
        num_keys = int(last_B.max()) + 1
        self._mask = self._make_mask(last_B, num_keys)
        shape = (2, len(last_B) * heads.num_kv_heads, -1, heads.head_dim)
        keys_PLH, self._values_PLH = self._gathered.view(shape)[:, :, :num_keys].unbind()
        self._keys_PHL = keys_PLH.transpose(1, 2)

    def attend(self, blocks: Tensor, q_BO: Tensor, explicit: ExplicitAttention | None) -> Tensor:
        """Compute attention for this group in one layer. Returns [B, query heads · H]. May overwrite `q_BO`."""
        heads = self._attention.heads
        torch.index_select(blocks, 0, self._gather_rows, out=self._gathered)
        q_PGH = q_BO.reshape(-1, heads.group, heads.head_dim)
        if explicit is not None:
            mask_P11L = None if self._mask is None else self._mask[:, None]
            out_PG1H = explicit(q_PGH.unsqueeze(2), self._keys_PHL.transpose(1, 2), self._values_PLH, mask_P11L)
            return out_PG1H.view(len(q_BO), -1)
        if self._mask is None:
            scores_PGL = torch.bmm(q_PGH.mul_(self._scale), self._keys_PHL)
        else:
            scores_PGL = torch.baddbmm(self._mask, q_PGH, self._keys_PHL, alpha=self._scale)
        return torch.bmm(torch.softmax(scores_PGL, -1), self._values_PLH).view(len(q_BO), -1)

    def _make_mask(self, last_B: NDArray[np.int64], num_keys: int) -> Tensor | None:
        """Return a mask [P, 1, L], or None if every sequence sees all L keys."""
        is_seen_BL = np.arange(num_keys) <= last_B[:, None]
        if self._window is not None:
            is_seen_BL &= np.arange(num_keys) > last_B[:, None] - self._window
        if is_seen_BL.all():
            return None
        return self._attention.additive_mask(is_seen_BL).repeat_interleave(self._attention.heads.num_kv_heads, 0)[
            :, None
        ]


class WholePrompts:
    """Adjacent chunks of equal length that begin their prompts. Their tokens see only keys of their own chunk."""

    def __init__(self, heads: HeadShape, scale: float, row: int, count: int) -> None:
        self._heads = heads
        self._scale = scale
        self.row = row
        self.count = count
        self.num_prompts = 1
        self._mask: Tensor | None = None

    @property
    def end(self) -> int:
        """The row after the last token of these chunks."""
        return self.row + self.num_prompts * self.count

    def attend(self, blocks: Tensor, qkv_TO: Tensor, explicit: ExplicitAttention | None) -> Tensor:
        """Compute attention for these chunks in one layer. Returns [num_prompts · count, query heads · H]."""
        heads = self._heads
        rows = qkv_TO[self.row : self.end]
        heads_BNTH = rows.view(self.num_prompts, self.count, -1, heads.head_dim).transpose(1, 2)
        q_BNTH, kv_BNTH = heads_BNTH[:, : heads.num_heads], heads_BNTH[:, heads.num_heads :]
        if explicit is not None:
            q_PGTH = q_BNTH.reshape(-1, heads.group, self.count, heads.head_dim)
            k_PTH, v_PTH = (x_BKTH.reshape(-1, self.count, heads.head_dim) for x_BKTH in kv_BNTH.chunk(2, dim=1))
            out_PGTH = explicit(q_PGTH, k_PTH, v_PTH, self._causal_mask(qkv_TO))
            return out_PGTH.view(q_BNTH.shape).transpose(1, 2).reshape(len(rows), -1)
        k_BNTH, v_BNTH = (x_BKTH.repeat_interleave(heads.group, 1) for x_BKTH in kv_BNTH.chunk(2, dim=1))
        out_BNTH = functional.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=True, scale=self._scale)
        return out_BNTH.transpose(1, 2).reshape(len(rows), -1)

    def _causal_mask(self, qkv_TO: Tensor) -> Tensor:
        """Return the mask [T, T], made once for all layers."""
        if self._mask is None:
            self._mask = qkv_TO.new_full((self.count, self.count), -torch.inf).triu_(1)
        return self._mask


class _LaterChunk:
    """A chunk of a prompt whose tokens see keys before the chunk, or don't see all earlier keys of the chunk."""

    def __init__(
        self,
        attention: GatherAttention,
        row: int,
        count: int,
        start: int,
        block_table: NDArray[np.int32],
        window: int | None,
        ends_T: NDArray[np.int32] | None = None,
    ) -> None:
        """`ends_T`: how many of the sequence's first tokens each token sees. None: those up to itself."""
        block_size = attention.kv.block_size
        first = int(_first_block(np.array([start]), window, block_size)[0])
        block_ids = block_table[first : -(-(start + count) // block_size)]
        self._heads = attention.heads
        self._scale = attention.scale
        self._rows = slice(row, row + count)
        self._gather_rows = attention.to_device(attention.kv.gather_rows(block_ids[None]))
        self._gathered = attention.scratch.rows(len(self._gather_rows))
        self._num_keys = start + count - first * block_size
        keys_L = np.arange(self._num_keys) + first * block_size
        queries_T1 = np.arange(start, start + count)[:, None]
        is_seen_TL = keys_L <= queries_T1 if ends_T is None else keys_L < ends_T[:, None]
        if window is not None:
            is_seen_TL &= keys_L > queries_T1 - window
        self._mask = attention.additive_mask(is_seen_TL)

    def attend(self, blocks: Tensor, qkv_TO: Tensor, explicit: ExplicitAttention | None) -> Tensor:
        """Compute attention for this chunk in one layer. Returns [count, query heads · H]."""
        heads = self._heads
        torch.index_select(blocks, 0, self._gather_rows, out=self._gathered)
        kv_2KLH = self._gathered.view(2, heads.num_kv_heads, -1, heads.head_dim)
        kv_2KLH = kv_2KLH[:, :, : self._num_keys]
        q_TO = qkv_TO[self._rows, : heads.num_heads * heads.head_dim]
        q_KGTH = q_TO.view(-1, heads.num_kv_heads, heads.group, heads.head_dim).permute(1, 2, 0, 3)
        if explicit is not None:
            keys_KLH, values_KLH = kv_2KLH.unbind()
            out_KGTH = explicit(q_KGTH, keys_KLH, values_KLH, self._mask)
        else:
            # Key-value heads are the batch dimension, so that query heads share the keys of their group without a copy.
            keys, values = kv_2KLH.unsqueeze(2).expand(-1, -1, heads.group, -1, -1).unbind()
            out_KGTH = functional.scaled_dot_product_attention(
                q_KGTH, keys, values, attn_mask=self._mask, scale=self._scale
            )
        return out_KGTH.permute(2, 0, 1, 3).reshape(q_TO.shape)


_Chunk = WholePrompts | _LaterChunk
