"""Attention to selected blocks of tokens, in plain torch.

Each key-value head has a query of the indexer. The score of a block is the highest product of this query with the keys
of the block's tokens that the querying token sees. The last blocks are always selected, and of blocks with the same
score, the first ones. A token that would see all blocks isn't computed here, but by dense attention.

Shape suffixes: T tokens of the step, S those that don't see all blocks, K key-value heads, G query heads for each of
those, D elements of an indexer's head, H of a head, L keys of a sequence, B blocks, P tokens in selected blocks, X
anything.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional

from raycore.attention.cache_writer import CacheWriter
from raycore.attention.explicit import SCORE_BYTES, at_a_time
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.memory import AttentionMemory
from raycore.attention.selection import IndexedKeys, first_highest
from raycore.attention.spec import AttentionSpec
from raycore.models.mixers.block_selecting import BlockSelectingHeads
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors
from raycore.step.memory import FLOAT32_BYTES, INT64_BYTES


class BlockSelection(IndexedKeys):
    """Keeps the keys of indexers, and selects blocks, for one step at a time. Implements `Selection`."""

    def __init__(self, spec: AttentionSpec, kv: KVTensors, *, batch_invariant: bool) -> None:
        """`batch_invariant`: make a token's scores independent of the other tokens, by computing it alone."""
        super().__init__(spec, kv, batch_invariant=batch_invariant)
        self.num_seen = self._index.num_selected * self._index.block_size

    def store(self, layer: int, beside_TX: Tensor) -> None:
        """Rotate and store the keys of all tokens of the step."""
        self._store_keys(layer, beside_TX[:, -self._index.head_dim :])

    def select(self, layer: int, beside_TX: Tensor) -> Tensor:
        """Return the blocks that are selected, int32[S, K, C], in their order: the first block of a sequence is 0."""
        index = self._index
        queries_SX = self._of_selecting(beside_TX[:, : -index.head_dim])
        q_SKD = self._turned_queries(layer, queries_SX.reshape(-1, index.num_heads, index.head_dim))
        found_SKC = torch.empty((*q_SKD.shape[:2], index.num_selected), dtype=torch.int32, device=self._device)
        for chunk in self._chunks:
            keys_LD = self._keys_of(layer, chunk)
            for some, ends_S in self._pieces(chunk, at_a_time(3 * index.num_heads * len(keys_LD))):
                scores_SKB = self._scores(q_SKD[some], keys_LD[: int(ends_S[-1])], ends_S)
                blocks_XC = first_highest(scores_SKB.flatten(0, 1), index.num_selected)
                found_SKC[some] = blocks_XC.view(*scores_SKB.shape[:2], -1)
        return found_SKC

    def _scores(self, q_SKD: Tensor, keys_LD: Tensor, ends_S: Ints) -> Tensor:
        """Return the scores of the blocks of a sequence, float32[S, K, B]."""
        index = self._index
        ends_S11 = to_device(ends_S, self._device)[:, None, None]
        products_XL = torch.mm(q_SKD.reshape(-1, index.head_dim).float(), keys_LD.t())
        products_XL.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
        products_SKL = products_XL.view(*q_SKD.shape[:2], -1)
        if ends_S[0] < len(keys_LD):
            hidden_S1L = torch.arange(len(keys_LD), device=self._device) >= ends_S11
            products_SKL = products_SKL.masked_fill(hidden_S1L, -torch.inf)
        padded_SKX = functional.pad(products_SKL, [0, -len(keys_LD) % index.block_size], value=-torch.inf)
        scores_SKB = padded_SKX.view(*padded_SKX.shape[:2], -1, index.block_size).amax(3)
        last_S1B = (ends_S11 - 1) // index.block_size - torch.arange(scores_SKB.shape[2], device=self._device)
        return scores_SKB.masked_fill_((last_S1B >= 0) & (last_S1B < index.num_local), torch.inf)


class BlockRowAttention:
    """Gathers the keys and values of some tokens at a time. Implements `AttendsToRows`."""

    def __init__(self, spec: AttentionSpec, kv: KVTensors, *, batch_invariant: bool) -> None:
        """`batch_invariant`: make a token's bits independent of the other tokens, by computing it alone."""
        assert spec.heads.index is not None, "blocks are selected"
        self._index, self._heads, self._scale, self._kv = spec.heads.index, spec.heads, spec.scale, kv
        self._batch_invariant = batch_invariant
        self._writer = CacheWriter(spec, kv, batch_invariant=batch_invariant)
        self._tables_SM = self._slots_S = self._positions_S = torch.empty(0)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._writer.begin(step, tensors)
        self._tables_SM, self._slots_S = tensors.block_tables_SM, tensors.slots_T
        self._positions_S = tensors.positions_T

    def store(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize and rotate queries and keys in place, and store keys and values."""
        self._writer(layer, qkv_TO)

    def attend_to_rows(self, layer: int, q_SX: Tensor, selected_SX: Tensor) -> Tensor:
        """Return the attention of queries to what `BlockSelection.select` has returned, [S, query heads · H]."""
        heads, num_seen = self._heads, selected_SX.shape[2] * self._index.block_size
        q_SKGH = q_SX.reshape(len(q_SX), heads.num_kv_heads, heads.group, heads.head_dim)
        size = 1 if self._batch_invariant else at_a_time(num_seen * heads.num_kv_heads * heads.head_dim)
        parts = [
            self._attend(layer, q_SKGH[some], self._tokens_in(selected_SX[some], some))
            for some in (slice(first, first + size) for first in range(0, len(q_SX), size))
        ]
        return torch.cat(parts).view(q_SX.shape)

    def _tokens_in(self, blocks_SKC: Tensor, some: slice) -> Tensor:
        """Return the tokens in selected blocks, int64[S, K, P]: block of the cache · its size + place in the block.

        Of those that a token doesn't see, the number is -1. `some`: which of the step's tokens have selected them.
        """
        block_size, slots_S11 = self._kv.block_size, self._slots_S[some, None, None].long()
        offsets_P = torch.arange(self._index.block_size, device=blocks_SKC.device)
        positions_SKP = (blocks_SKC.unsqueeze(3) * self._index.block_size + offsets_P).flatten(2)
        hidden_SKP = positions_SKP > self._positions_S[some, None, None]
        positions_SKP.masked_fill_(hidden_SKP, 0)
        tokens_SKP = self._tables_SM[slots_S11, positions_SKP // block_size].long().mul_(block_size)
        return tokens_SKP.add_(positions_SKP.remainder_(block_size)).masked_fill_(hidden_SKP, -1)

    def _attend(self, layer: int, q_SKGH: Tensor, tokens_SKP: Tensor) -> Tensor:
        heads, block_size = self._heads, self._kv.block_size
        shown_SKP = tokens_SKP.clamp_min(0)
        own_K1 = torch.arange(heads.num_kv_heads, device=tokens_SKP.device)[:, None]
        of_keys = (shown_SKP // block_size * 2 * heads.num_kv_heads + own_K1) * block_size + shown_SKP % block_size
        keys_XPH, values_XPH = (
            self._kv.rows[layer].index_select(0, each.flatten()).view(-1, tokens_SKP.shape[2], heads.head_dim)
            for each in (of_keys, of_keys + heads.num_kv_heads * block_size)
        )
        scores_XGP = torch.bmm(q_SKGH.reshape(-1, *q_SKGH.shape[2:]), keys_XPH.transpose(1, 2)).float()
        hidden_X1P = tokens_SKP.flatten(0, 1).unsqueeze(1) < 0
        weights_XGP = scores_XGP.mul_(self._scale).masked_fill_(hidden_X1P, -torch.inf).softmax(-1)
        return torch.bmm(weights_XGP.to(values_XPH.dtype), values_XPH).view(q_SKGH.shape)


class BlockSelectingMemory(AttentionMemory):
    """That of attention to selected blocks of tokens."""

    def token_numbers(self, *, is_native: bool) -> int:
        heads, size = self._heads, self._selecting.indexer.head_dim
        queries = 6 * (heads.num_kv_heads + 1) * size
        return super().token_numbers(is_native=is_native) + queries + 2 * heads.num_heads * heads.head_dim

    def attention_bytes(self, windows: Collection[int | None]) -> int:
        limits, heads, indexer = self.limits, self._heads, self._selecting.indexer
        max_keys, num_seen = limits.max_model_len + indexer.block_size, indexer.num_selected * indexer.block_size
        num_tokens = 1 if self.batch_invariant else limits.num_tokens
        of_token = 3 * heads.num_kv_heads * max_keys * FLOAT32_BYTES
        keys = 2 * max_keys * indexer.head_dim * (self.dtype.itemsize + FLOAT32_BYTES)
        scores = max(of_token, min(SCORE_BYTES, num_tokens * of_token))
        selected = limits.num_tokens * heads.num_kv_heads * indexer.num_selected * torch.int32.itemsize
        together = min(num_tokens, at_a_time(num_seen * heads.num_kv_heads * heads.head_dim))
        numbers = 2 * heads.head_dim * (1 if self.dtype == torch.float32 else 2) * self.dtype.itemsize
        of_keys = numbers + 3 * heads.group * FLOAT32_BYTES + 5 * INT64_BYTES
        gathered = together * heads.num_kv_heads * num_seen * of_keys
        return super().attention_bytes(windows) + keys + scores + selected + gathered

    @property
    def _selecting(self) -> BlockSelectingHeads:
        return self.mixer
