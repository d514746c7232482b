"""Selects the tokens that each token sees, by the scores of an indexer, in plain torch.

The score of a token is the sum, over the indexer's heads, of what is above 0 in the product of the head's query with
the token's key, times the weight that the querying token gives the head. Of tokens with the same score, the first ones
are selected.

Scores are computed in float32. Keys are stored after their rotation, in the order of pairs: see `raycore.layers.rope`.
The pass of keys through a rotation by Hadamard, and their rounding to fp8, which DeepSeek's own code has, are left out,
as in transformers' code: the first changes no product.

Shape suffixes: T tokens of the step, S those that don't see all tokens before them, N heads of the indexer, D elements
of a head, L keys of a sequence, K selected tokens, X anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raycore.attention.explicit import at_a_time
from raycore.attention.latent_tensors import token_rows
from raycore.attention.paged_cache import PagedCache
from raycore.attention.spec import AttentionSpec
from raycore.layers.linear import AroundLinear
from raycore.layers.rope import Rope, rotate_
from raycore.layers.rows import on_one_thread
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors


@dataclass(frozen=True)
class SelectingChunk:
    """A sequence's tokens that don't see all tokens before them."""

    first: int
    """Among all such tokens of the step."""
    ends_S: Ints
    """From how many tokens each one selects: the first ones of the sequence."""
    block_ids: Tensor
    """int64: those with the keys from which the last of them selects."""


class IndexedKeys:
    """Keeps the keys of indexers, which the tokens of a sequence have one each."""

    def __init__(self, spec: AttentionSpec, kv: PagedCache, *, batch_invariant: bool) -> None:
        """`batch_invariant`: make a token's scores independent of the other tokens, by computing it alone."""
        index = spec.heads.index
        assert index is not None, "tokens are selected"
        self._index, self._kv, self._device = index, kv, spec.device
        self._batch_invariant = batch_invariant
        self._ropes = spec.ropes
        self._turns_T1C: dict[Rope, Tensor] = {}
        self._turns_S1C: dict[Rope, Tensor] = {}
        self._write_rows = torch.empty(0)
        self._rows_S: Tensor | None = None
        self._chunks: list[SelectingChunk] = []

    def begin(
        self, step: StepInputs, tensors: StepTensors, selecting: StepInputs | None, rows_S: Tensor | None
    ) -> None:
        """Prepare for the layers of `step`. The arguments are those of `Selection.begin`."""
        block_size = self._kv.block_size
        block_ids_T = step.block_tables[step.token_slots, step.positions // block_size]
        self._write_rows = to_device(token_rows(block_ids_T, step.positions, block_size), self._device)
        num_pairs = self._index.num_rotated // 2
        self._turns_T1C = {rope: rope.turns(tensors.positions_T)[..., :num_pairs] for rope in set(self._ropes)}
        self._chunks, self._rows_S = [], rows_S
        self._turns_S1C = {rope: self._of_selecting(turns_T1C) for rope, turns_T1C in self._turns_T1C.items()}
        for slot, count, start, first in _sequences(selecting):
            ends_S = np.arange(start + 1, start + count + 1)
            num_blocks = -(-(start + count) // block_size)
            block_ids = to_device(step.block_tables[slot, :num_blocks].astype(np.int64), self._device)
            self._chunks.append(SelectingChunk(first, ends_S, block_ids))

    def _store_keys(self, layer: int, keys_TD: Tensor) -> None:
        """Rotate and store the keys of all tokens of the step."""
        turns_T1C = self._turns_T1C[self._ropes[layer]]
        self._stored(layer).index_copy_(0, self._write_rows, self._turned(keys_TD.unsqueeze(1), turns_T1C).squeeze(1))

    def _keys_of(self, layer: int, chunk: SelectingChunk) -> Tensor:
        """Return the keys of a sequence, float32[L, D]."""
        size = self._index.head_dim
        blocks_XX = self._stored(layer).view(-1, self._kv.block_size * size).index_select(0, chunk.block_ids)
        return blocks_XX.view(-1, size)[: int(chunk.ends_S[-1])].float()

    def _pieces(self, chunk: SelectingChunk, size: int) -> Iterator[tuple[slice, Ints]]:
        """Yield for which tokens scores are computed together, at most `size`, with their ends."""
        size = 1 if self._batch_invariant else size
        for first in range(0, len(chunk.ends_S), size):
            ends_S = chunk.ends_S[first : first + size]
            yield slice(chunk.first + first, chunk.first + first + len(ends_S)), ends_S

    def _of_selecting(self, x_TX: Tensor) -> Tensor:
        """Return the rows of the tokens that don't see all tokens before them."""
        return x_TX if self._rows_S is None else x_TX.index_select(0, self._rows_S)

    def _turned_queries(self, layer: int, q_SND: Tensor) -> Tensor:
        """Return the queries of the tokens that don't see all tokens before them, after their rotation."""
        return self._turned(q_SND, self._turns_S1C[self._ropes[layer]])

    def _turned(self, heads_TND: Tensor, turns_T1C: Tensor) -> Tensor:
        """Return heads after their rotation, in the order of pairs."""
        turned_TNX, rest_TNX = heads_TND.tensor_split([self._index.num_rotated], 2)
        if not self._index.is_adjacent:
            turned_TNX = turned_TNX.reshape(*turned_TNX.shape[:2], 2, -1).transpose(2, 3).flatten(2)
        turned_TNX = turned_TNX.clone(memory_format=torch.contiguous_format)
        if self._batch_invariant:
            on_one_thread(rotate_, turned_TNX, turns_T1C)
        else:
            rotate_(turned_TNX, turns_T1C)
        return torch.cat([turned_TNX, rest_TNX], 2)

    def _stored(self, layer: int) -> Tensor:
        stored_XD = self._kv.beside[layer]
        assert stored_XD is not None, "the layer has an indexer"
        return stored_XD


class TokenSelection(IndexedKeys):
    """Keeps the keys of indexers, and selects tokens, for one step at a time. Implements `Selection`."""

    def __init__(self, spec: AttentionSpec, kv: PagedCache, *, batch_invariant: bool) -> None:
        """`batch_invariant`: make a token's scores independent of the other tokens, by computing it alone."""
        super().__init__(spec, kv, batch_invariant=batch_invariant)
        self.num_seen = self._index.num_selected
        self._queries = spec.index_queries

    def store(self, layer: int, beside_TX: Tensor) -> None:
        """Rotate and store the keys of all tokens of the step."""
        self._store_keys(layer, self._parts_of(beside_TX)[1])

    def select(self, layer: int, beside_TX: Tensor) -> Tensor:
        """Return the rows in the cache of the tokens that are selected, int32[S, K], in their order."""
        index, make_queries = self._index, self._queries[layer]
        assert make_queries is not None, "the layer has an indexer"
        made_of_TQ, _, weights_TN = self._parts_of(beside_TX)
        if isinstance(make_queries, AroundLinear):
            # adapters know the rows of a step
            queries_SX = self._of_selecting(make_queries(made_of_TQ.contiguous()))
        else:
            queries_SX = make_queries(self._of_selecting(made_of_TQ).contiguous())
        q_SND = self._turned_queries(layer, queries_SX.view(-1, index.num_heads, index.head_dim))
        weights_SN = self._of_selecting(weights_TN).float() * index.num_heads**-0.5
        found_SK = torch.empty((len(q_SND), index.num_selected), dtype=torch.int32, device=self._device)
        for chunk in self._chunks:
            keys_LD = self._keys_of(layer, chunk)
            # beside the scores of heads, there are their sum, and what finds the highest ones
            for some, ends_S in self._pieces(chunk, at_a_time((index.num_heads + 8) * len(keys_LD))):
                scores_SL = self._scores(q_SND[some], weights_SN[some], keys_LD[: int(ends_S[-1])], ends_S)
                found_SK[some] = self._rows_of(first_highest(scores_SL, index.num_selected), chunk.block_ids)
        return found_SK

    def _parts_of(self, beside_TX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what queries are made of, keys, and the weights of the indexer's heads."""
        sizes = [self._index.query_rank, self._index.head_dim, self._index.num_heads]
        made_of_TQ, keys_TD, weights_TN = torch.split(beside_TX, sizes, 1)
        return made_of_TQ, keys_TD, weights_TN

    def _scores(self, q_SND: Tensor, weights_SN: Tensor, keys_LD: Tensor, ends_S: Ints) -> Tensor:
        """Return the scores of the keys of a sequence, float32[S, L]. Of keys that a token doesn't see, and of what
        isn't a number, they are minus infinity."""
        products_XL = torch.mm(q_SND.reshape(-1, self._index.head_dim).float(), keys_LD.t())
        products_XL.mul_(self._index.head_dim**-0.5).relu_()
        products_SNL = products_XL.view(*q_SND.shape[:2], len(keys_LD))
        scores_SL = torch.bmm(weights_SN.unsqueeze(1), products_SNL).squeeze(1)
        scores_SL.nan_to_num_(-torch.inf, torch.inf, -torch.inf)
        if ends_S[0] < len(keys_LD):
            hidden_SL = torch.arange(len(keys_LD), device=self._device) >= to_device(ends_S, self._device)[:, None]
            scores_SL.masked_fill_(hidden_SL, -torch.inf)
        return scores_SL

    def _rows_of(self, positions_SK: Tensor, block_ids: Tensor) -> Tensor:
        block_size = self._kv.block_size
        return block_ids[positions_SK // block_size] * block_size + positions_SK % block_size


def first_highest(scores_SL: Tensor, count: int) -> Tensor:
    """Return the indexes of the `count` highest scores of each row, int64[S, count], ascending. There are so many.

    Of equal scores, the first ones are taken.
    """
    lowest_S1 = scores_SL.topk(count, sorted=False).values.amin(1, keepdim=True)
    above_SL, equal_SL = scores_SL > lowest_S1, scores_SL == lowest_S1
    num_left_S1 = count - above_SL.sum(1, keepdim=True)
    return (above_SL | (equal_SL & (equal_SL.cumsum(1) <= num_left_S1))).nonzero()[:, 1].view(-1, count)


def _sequences(step: StepInputs | None) -> Iterator[tuple[int, int, int, int]]:
    """Yield of each sequence: its slot, the number of its tokens, the position of the first one, and its row."""
    if step is not None:
        for columns in zip(step.slots, step.counts, step.starts, step.first_rows, strict=True):
            slot, count, start, first = (int(each) for each in columns)
            yield slot, count, start, first
