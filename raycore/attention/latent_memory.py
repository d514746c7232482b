"""An upper bound on the memory that latent attention needs in a step."""

from __future__ import annotations

from collections.abc import Collection

import torch

from raycore.attention.explicit import SCORE_BYTES, at_a_time
from raycore.attention.memory import exchanged_bytes
from raycore.models.mixers.latent import LatentHeads
from raycore.models.mixers.selecting import SelectingHeads
from raycore.step.memory import FLOAT32_BYTES, INT64_BYTES, MixerMemory


class LatentMemory(MixerMemory):
    """That of latent attention."""

    def token_numbers(self, *, is_native: bool) -> int:
        heads, num_heads = self._latent, self.spec.num_heads // self.tp_size
        queries, values = num_heads * heads.query_dim, num_heads * heads.value_dim
        first = heads.width + (queries if heads.query_rank is None else heads.query_rank + 2 * queries)
        fused, results = (num_heads + 1) * heads.width, num_heads * heads.rank
        # in plain torch, matrix products of heads are computed beside their places
        copies = 0 if is_native else fused + results
        return first + fused + results + values + copies

    def exchanged_bytes(self) -> int:
        num_heads = self.spec.num_heads // self.tp_size
        return exchanged_bytes(self, num_heads, self._latent.width, self._latent.rank)

    def attention_bytes(self, windows: Collection[int | None]) -> int:
        """Return the bytes of the keys of one request, and of scores and masks of some of its tokens."""
        limits = self.limits
        # of all workers for which the worker attends to its keys
        num_heads = self.spec.num_heads // self.tp_size * (limits.num_query_parts if limits.context_size > 1 else 1)
        # no worker has more than its tokens of whole rounds
        round_size = limits.block_size * limits.context_size
        max_keys = limits.max_model_len + 1
        if limits.context_size > 1:
            max_keys = -(-max_keys // round_size) * limits.block_size
        keys = max_keys * self._latent.width * self.dtype.itemsize
        if self.dtype != torch.float32:
            keys *= 2  # on a CPU, the matrix product copies them
        of_token = num_heads * max_keys
        num_tokens = 1 if self.batch_invariant else limits.num_tokens
        scores = max(of_token * FLOAT32_BYTES, min(SCORE_BYTES, num_tokens * of_token * FLOAT32_BYTES))
        mask = scores // (FLOAT32_BYTES * num_heads)
        indexes = limits.num_seqs * (max_keys // limits.block_size + 1) * INT64_BYTES
        return keys + 3 * scores + 2 * mask + indexes

    @property
    def _latent(self) -> LatentHeads:
        return self.mixer


class SelectingMemory(LatentMemory):
    """That of latent attention to selected tokens, where a layer has an indexer."""

    def token_numbers(self, *, is_native: bool) -> int:
        heads, indexer = self._selecting, self._selecting.indexer
        num_heads = self.spec.num_heads // self.tp_size
        # what attention gets twice, with what it gets beside, whose queries are turned
        beside = (heads.query_rank or 0) + 2 * (indexer.head_dim + indexer.num_heads)
        copied = (num_heads + 1) * heads.width + num_heads * heads.rank
        queries = 3 * indexer.num_heads * indexer.head_dim
        return super().token_numbers(is_native=is_native) + 2 * beside + copied + queries

    def layer_bytes(self, *, is_native: bool) -> int:
        num_heads = self.spec.num_heads // self.tp_size
        if not is_native:
            return 0  # that of attention says it
        numbers = 4 * self.spec.hidden_size + self.token_numbers(is_native=is_native)
        # native kernels return parts of attention
        parts = num_heads * (self._latent.rank + 2) * FLOAT32_BYTES
        return (
            self.limits.num_tokens * (numbers * self.dtype.itemsize + parts) + self._score_bytes() + self._rows_bytes()
        )

    def attention_bytes(self, windows: Collection[int | None]) -> int:
        if self._selecting.is_shared:
            return 0  # attention of the layers that select tokens computes these, too
        heads, num_selected = self._selecting, self._selecting.indexer.num_selected
        num_heads = self.spec.num_heads // self.tp_size
        size = at_a_time(num_selected * max(heads.width, num_heads))
        num_tokens = min(1 if self.batch_invariant else size, self.limits.num_tokens)
        gathered = heads.width * self.dtype.itemsize * (1 if self.dtype == torch.float32 else 2)
        of_token = num_selected * (gathered + 3 * num_heads * FLOAT32_BYTES)
        return max(super().attention_bytes(windows), num_tokens * of_token, self._score_bytes()) + self._rows_bytes()

    def _rows_bytes(self) -> int:
        """Return the bytes of the rows that all tokens of a step see."""
        return self.limits.num_tokens * self._selecting.indexer.num_selected * INT64_BYTES

    def _score_bytes(self) -> int:
        """Return the bytes of an indexer's keys of one request, and of the scores of some of its tokens."""
        limits, indexer = self.limits, self._selecting.indexer
        max_keys = limits.max_model_len + 1
        keys = 2 * max_keys * indexer.head_dim * (self.dtype.itemsize + FLOAT32_BYTES)
        of_token = (indexer.num_heads + 8) * max_keys * FLOAT32_BYTES
        num_tokens = 1 if self.batch_invariant else limits.num_tokens
        return keys + max(of_token, min(SCORE_BYTES, num_tokens * of_token))

    @property
    def _selecting(self) -> SelectingHeads:
        return self.mixer
