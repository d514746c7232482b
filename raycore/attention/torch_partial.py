"""Partial attention in plain torch: gathers the blocks that some tokens see, and computes all their scores.

Tokens that are computed together are a *unit*: decodes of several sequences, or tokens of one sequence. With batch
invariance, a unit is a tile of `TILE` positions of one sequence, as in `batch_invariant`: it always has the same shape,
whatever part of it the step computes.

Shape suffixes: T tokens, B sequences of a unit, Q rows for each of them, K key-value heads, G query heads for each of
those, M = K·G query heads of all workers that have the same key-value heads, N of those of this worker, H elements of a
head, L keys, P pairs of a sequence and a key-value head, or parts, X anything.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raycore.attention.batch_invariant import TILE
from raycore.attention.cache_writer import CacheWriter
from raycore.attention.context_share import ContextShare
from raycore.attention.explicit import at_a_time
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.scratch import GatherScratch, groups_that_fit
from raycore.attention.spec import AttentionSpec
from raycore.layers.rows import on_one_thread, row_by_row
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors

STRETCH = 128
"""With batch invariance, keys are read in units of this many tokens, rounded up to whole blocks."""


def max_blocks(max_model_len: int, share: ContextShare) -> int:
    """Return the maximum number of blocks that are gathered for one request.

    One token may be sampled beyond the longest sequence, tiles may reach beyond that, and stretches are whole.
    """
    stretch = _blocks_of_stretch(share.block_size)
    num_blocks = -(-(max_model_len + TILE) // (share.block_size * share.size))
    return -(-num_blocks // stretch) * stretch


def _blocks_of_stretch(block_size: int) -> int:
    return -(-STRETCH // block_size)


class TorchPartialAttention:
    """Implements `PartialAttention`. A head's part has H numbers, the results, and the natural logarithm of the sum of
    the exponentials of the scores."""

    def __init__(
        self,
        spec: AttentionSpec,
        kv: KVTensors,
        share: ContextShare,
        scratch: GatherScratch,
        num_query_heads: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            num_query_heads: those of all workers that have the same key-value heads.
            batch_invariant: make the bits of a token's result independent of the other tokens.
        """
        self._spec = spec
        self._kv = kv
        self._share = share
        self._scratch = scratch
        self._num_query_heads = num_query_heads
        self._batch_invariant = batch_invariant
        self._writer = CacheWriter(spec, kv, share, batch_invariant=batch_invariant)
        self._units: dict[int | None, list[_Unit]] = {}
        self._sinks_N = [None if sinks_N is None else spec.copies(sinks_N.float) for sinks_N in spec.sinks_N]

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._writer.begin(step, tensors)
        divide = self._tiles if self._batch_invariant else self._decodes_and_chunks
        self._units = {window: divide(step, window) for window in set(self._spec.windows)}

    def store(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize and rotate queries and keys in place, and store the worker's share of keys and values."""
        self._writer(layer, qkv_TO)

    def attend(self, layer: int, q_TX: Tensor) -> Tensor:
        """Return parts of attention, float32[T, M · (H + 1)]."""
        q_TMH = q_TX.view(len(q_TX), self._num_query_heads, -1)
        part_TMX = q_TX.new_empty((len(q_TX), self._num_query_heads, q_TMH.shape[2] + 1), dtype=torch.float32)
        for unit in self._units[self._spec.windows[layer]]:
            part_TMX.index_copy_(0, unit.tokens, unit.attend(self._kv.blocks[layer], q_TMH, self._scratch, self._spec))
        return part_TMX.flatten(1)

    def merge(self, layer: int, parts_PTX: Tensor) -> Tensor:
        """Return attention to all keys, [T, N · H]."""
        return merge_heads(self._spec, parts_PTX, self._sinks_N[layer], batch_invariant=self._batch_invariant)

    def _decodes_and_chunks(self, step: StepInputs, window: int | None) -> list[_Unit]:
        firsts_T, ends_T = self._share.seen(step.positions, window, step.features.ends if step.features else None)
        block_size = self._kv.block_size
        units: list[_Unit] = []
        if step.num_decodes:
            decodes = np.arange(step.num_decodes)
            first_blocks_B = firsts_T[decodes] // block_size
            num_blocks_B = np.maximum(1, -(-ends_T[decodes] // block_size) - first_blocks_B)
            for members in groups_that_fit(num_blocks_B, self._scratch.num_blocks):
                seen = firsts_T[members, None], ends_T[members, None]
                blocks = first_blocks_B[members], int(num_blocks_B[members].max())
                units.append(self._unit(step, members[:, None], seen, blocks))
        first_rows = step.first_rows
        for index in range(step.num_decodes, len(step.slots)):
            first_row = int(first_rows[index])
            rows_1Q = np.arange(first_row, first_row + int(step.counts[index]))[None]
            seen = firsts_T[rows_1Q], ends_T[rows_1Q]
            first_block = int(firsts_T[first_row]) // block_size
            num_blocks = max(1, -(-int(seen[1].max()) // block_size) - first_block)
            units.append(self._unit(step, rows_1Q, seen, (np.array([first_block]), num_blocks)))
        return units

    def _tiles(self, step: StepInputs, window: int | None) -> list[_Unit]:
        tiles_T = step.positions // TILE
        is_new_T = (np.diff(tiles_T) != 0) | (np.diff(step.token_slots) != 0)
        block_size, stretch = self._kv.block_size, _blocks_of_stretch(self._kv.block_size)
        units: list[_Unit] = []
        for rows in np.split(np.arange(len(tiles_T)), np.flatnonzero(is_new_T) + 1):
            start = int(tiles_T[rows[0]]) * TILE
            firsts_1Q, ends_1Q = self._share.seen(np.arange(start, start + TILE)[None], window)
            first_block = int(firsts_1Q.min()) // block_size // stretch * stretch
            num_blocks = -(-int(ends_1Q.max()) // block_size) - first_block
            num_blocks = max(1, -(-num_blocks // stretch)) * stretch
            kept = step.positions[rows] - start
            rows_1Q = np.full((1, TILE), rows[0])
            rows_1Q[0, kept] = rows
            blocks = np.array([first_block]), num_blocks
            units.append(self._unit(step, rows_1Q, (firsts_1Q, ends_1Q), blocks, kept))
        return units

    def _unit(
        self,
        step: StepInputs,
        rows_BQ: Ints,
        seen: tuple[Ints, Ints],
        blocks: tuple[Ints, int],
        kept: Ints | None = None,
    ) -> _Unit:
        """Return a unit.

        Args:
            rows_BQ: of the step's tokens.
            seen: by row, the local positions of the first key and after the last one.
            blocks: by sequence, the first block that is gathered, and the number of blocks of each.
            kept: which of the rows have results that count. None: all.
        """
        firsts_BQ, ends_BQ = seen
        first_blocks_B, num_blocks = blocks
        tables_BM = step.block_tables[step.token_slots[rows_BQ[:, 0]]]
        # beyond the table, all keys are hidden
        columns_BM = np.minimum(first_blocks_B[:, None] + np.arange(num_blocks), tables_BM.shape[1] - 1)
        block_ids_BM = np.take_along_axis(tables_BM, columns_BM, 1)
        shift_B1 = first_blocks_B[:, None] * self._kv.block_size
        rows = rows_BQ.ravel()
        return _Unit(
            rows=self._to_device(rows),
            tokens=self._to_device(rows if kept is None else rows[kept]),
            kept=self._to_device(np.arange(len(rows)) if kept is None else kept),
            firsts_BQ=self._to_device(firsts_BQ - shift_B1),
            ends_BQ=self._to_device(ends_BQ - shift_B1),
            gather_rows=self._to_device(self._kv.gather_rows(block_ids_BM)),
            num_keys=num_blocks * self._kv.block_size,
        )

    def _to_device(self, values: Ints) -> Tensor:
        return to_device(values, self._spec.device)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Tokens that are computed together, Q of each of B sequences."""

    rows: Tensor
    """int64[B·Q]: of the step's tokens."""
    tokens: Tensor
    """Those of them whose results count."""
    kept: Tensor
    """The indexes of these in `rows`."""
    firsts_BQ: Tensor
    """The first key that each row sees, as an index of what is gathered."""
    ends_BQ: Tensor
    """The index after the last key."""
    gather_rows: Tensor
    num_keys: int

    def attend(self, blocks: Tensor, q_TMH: Tensor, scratch: GatherScratch, spec: AttentionSpec) -> Tensor:
        """Return parts of the tokens that count, float32[tokens, M, H + 1]."""
        num_kv_heads, head_dim = spec.heads.num_kv_heads, q_TMH.shape[2]
        gathered = torch.index_select(blocks, 0, self.gather_rows, out=scratch.rows(len(self.gather_rows)))
        keys_PLH, values_PLH = gathered.view(2, -1, self.num_keys, head_dim).unbind()
        num_sequences, num_rows = self.firsts_BQ.shape
        q_BQKGH = q_TMH.index_select(0, self.rows).view(num_sequences, num_rows, num_kv_heads, -1, head_dim)
        q_BKGQH = q_BQKGH.permute(0, 2, 3, 1, 4)
        size = at_a_time(num_sequences * q_TMH.shape[1] * self.num_keys)
        parts = [
            _attend(q_BKGQH[..., rows, :], keys_PLH, values_PLH, self._hidden(rows), spec)
            for rows in (slice(first, first + size) for first in range(0, num_rows, size))
        ]
        part_BKGQX = parts[0] if len(parts) == 1 else torch.cat(parts, 3)
        part_TMX = part_BKGQX.permute(0, 3, 1, 2, 4).reshape(len(self.rows), -1, head_dim + 1)
        return part_TMX.index_select(0, self.kept)

    def _hidden(self, rows: slice) -> Tensor:
        """Return bool[B, 1, 1, Q, L]: the keys that these of the Q rows don't see."""
        keys_L = torch.arange(self.num_keys, device=self.firsts_BQ.device)
        firsts_BQ1, ends_BQ1 = self.firsts_BQ[:, rows, None], self.ends_BQ[:, rows, None]
        return ((keys_L < firsts_BQ1) | (keys_L >= ends_BQ1))[:, None, None]


def _attend(
    q_BKGQH: Tensor, keys_PLH: Tensor, values_PLH: Tensor, is_hidden_B11QL: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return parts [B, K, G, Q, H + 1]. The pairs of a sequence and a key-value head, B·K, are neighbors."""
    scores = torch.bmm(q_BKGQH.reshape(len(keys_PLH), -1, q_BKGQH.shape[4]), keys_PLH.transpose(1, 2)).float()
    if spec.softcap is None:
        scores.mul_(spec.scale)
    else:
        scores.mul_(spec.scale / spec.softcap).tanh_().mul_(spec.softcap)
    scores_BKGQL = scores.view(*q_BKGQH.shape[:4], -1).masked_fill_(is_hidden_B11QL, -torch.inf)
    highest_BKGQ1 = scores_BKGQL.amax(-1, keepdim=True)
    shift_BKGQ1 = highest_BKGQ1.masked_fill(highest_BKGQ1 == -torch.inf, 0.0)  # a row may see no key
    weights_BKGQL = scores_BKGQL.sub_(shift_BKGQ1).exp_()
    total_BKGQ1 = weights_BKGQL.sum(-1, keepdim=True)
    out = torch.bmm(weights_BKGQL.to(values_PLH.dtype).view(scores.shape), values_PLH)
    out_BKGQH = out.float().view(q_BKGQH.shape).div_(total_BKGQ1.clamp_min(torch.finfo(torch.float32).tiny))
    return torch.cat([out_BKGQH, total_BKGQ1.log_().add_(shift_BKGQ1)], -1)


def merge_heads(spec: AttentionSpec, parts_PTX: Tensor, sinks_N: Tensor | None, *, batch_invariant: bool) -> Tensor:
    """Return attention to all keys, [T, N · H] in the model's dtype, of this worker's heads. See `merge`."""
    parts_PTNX = parts_PTX.view(*parts_PTX.shape[:2], spec.heads.num_heads, -1)
    return merge(parts_PTNX, sinks_N, batch_invariant=batch_invariant).to(spec.dtype).flatten(1)


def merge(parts_PTNX: Tensor, sinks_N: Tensor | None, *, batch_invariant: bool = False) -> Tensor:
    """Return attention to all keys, float32[T, N, H], of parts with H + 1 numbers.

    The parts are added one after the other: a reduction over them might have another order for other shapes.

    Args:
        sinks_N: one more logit of each head, which has no value.
        batch_invariant: make a token's bits independent of the number of tokens.
    """
    logs_TPN = parts_PTNX[..., -1].transpose(0, 1)
    if sinks_N is not None:
        logs_TPN = torch.cat([logs_TPN, sinks_N.expand(len(logs_TPN), 1, -1)], 1)
    shifted_TPN = logs_TPN - logs_TPN.amax(1, keepdim=True)
    exponential = row_by_row(torch.exp) if batch_invariant else torch.exp
    weights_TPN1 = on_one_thread(exponential, shifted_TPN.flatten(1)).view(shifted_TPN.shape)[..., None]
    total_TN1 = weights_TPN1[:, 0].clone()
    for part in range(1, weights_TPN1.shape[1]):
        total_TN1.add_(weights_TPN1[:, part])
    out_TNH = parts_PTNX[0, ..., :-1] * weights_TPN1[:, 0]
    for part in range(1, len(parts_PTNX)):
        out_TNH.add_(parts_PTNX[part, ..., :-1] * weights_TPN1[:, part])
    return out_TNH.div_(total_TN1)
