"""An upper bound on the memory that attention to keys and values needs in a step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from raycore.attention.batch_invariant import TILE, BatchInvariantAttention
from raycore.attention.context_share import ContextShare
from raycore.attention.explicit import SCORE_BYTES
from raycore.attention.gather import GatherAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.scratch import num_scratch_blocks
from raycore.attention.torch_partial import max_blocks as max_partial_blocks
from raycore.models.mixers.spec import HeadShape
from raycore.step.memory import FLOAT32_BYTES, INT64_BYTES, MixerMemory


class AttentionMemory(MixerMemory):
    """That of attention whose heads have keys and values."""

    def token_numbers(self, *, is_native: bool) -> int:
        heads = self._heads
        numbers = (2, 2) if is_native else (5, 6)
        gates = 2 if self.spec.attention_gate == "elements" else 0
        # plain torch normalizes copies in float32
        norms = 3 if is_native and self.spec.qk_norm == "own_heads" else 0
        of_queries, of_keys = numbers[0] + gates + norms, numbers[1] + norms
        mixed = (of_queries * heads.num_heads + of_keys * heads.num_kv_heads) * heads.head_dim
        if self.spec.attention_gate == "heads":
            mixed += 2 * heads.num_heads
        if not self.mixer.is_cached_as_it_is(self.spec):
            # with values as wide as keys, and results as wide as values
            mixed += 2 * (heads.num_heads + heads.num_kv_heads) * heads.head_dim
        return mixed

    def exchanged_bytes(self) -> int:
        return exchanged_bytes(self, self._heads.num_heads, self._heads.head_dim, self._heads.head_dim)

    def scratch_bytes(self) -> int:
        limits, heads = self.limits, self._heads
        max_blocks = self._attention.max_blocks(limits.max_model_len, limits.block_size)
        if limits.context_size > 1:
            max_blocks = self._max_partial_blocks
        bytes_per_block = KVTensors.bytes_per_block(
            1, heads.num_kv_heads, limits.block_size, heads.head_dim, self.dtype
        )
        return num_scratch_blocks(bytes_per_block, limits.num_seqs, max_blocks) * bytes_per_block

    def attention_bytes(self, windows: Collection[int | None]) -> int:
        """Return scratch memory, scores, and for each of `windows` row indexes and masks."""
        windows = self._of_own_layers(windows)
        if self.limits.context_size > 1:
            return self._partial_bytes(len(windows))
        limits, dtype, heads, attention = self.limits, self.dtype, self._heads, self._attention
        num_kv_heads, group, scratch = heads.num_kv_heads, heads.group, self.scratch_bytes()
        max_keys = attention.max_blocks(limits.max_model_len, limits.block_size) * limits.block_size
        num_readers = min(limits.num_seqs, limits.num_tokens)
        if self.batch_invariant:
            mask_rows = limits.num_tokens + 2 * TILE * num_readers
            scores = scratch * TILE * group // (2 * heads.head_dim) + TILE * 32 * group * max_keys * dtype.itemsize
        else:
            mask_rows = max(limits.num_tokens, num_readers * num_kv_heads)
            scores = scratch * group // heads.head_dim
            if dtype != torch.float32:
                scores += scratch // 2  # on a CPU, the matrix product copies the keys
        if self.spec.attention_softcap is not None or self.mixer.sinks:
            of_token = group * num_kv_heads * max_keys
            if self.batch_invariant:
                scores += _explicit_bytes(TILE * of_token, 0)  # one tile at a time
            else:
                num_in_decodes = group * scratch // (2 * heads.head_dim * dtype.itemsize)
                scores += _explicit_bytes(num_in_decodes, limits.num_tokens * of_token)
        # tokens that are computed together see their own keys, those of a window, and what rounding adds at both ends
        num_together = TILE if self.batch_invariant else limits.num_tokens
        around = num_together + 2 * attention.max_blocks(0, limits.block_size) * limits.block_size
        keys = sum(max_keys if window is None else min(max_keys, window + around) for window in windows)
        masks = mask_rows * keys * (dtype.itemsize + 1)
        gather_rows = num_readers * -(-keys // limits.block_size) * 2 * num_kv_heads * INT64_BYTES
        return scratch + scores + masks + 3 * gather_rows

    def _partial_bytes(self, num_windows: int) -> int:
        """Return the bytes for attention to a share of the keys: scratch memory, scores, and row indexes."""
        limits, heads, scratch = self.limits, self._heads, self.scratch_bytes()
        num_heads, max_blocks = heads.num_heads * limits.num_query_parts, self._max_partial_blocks
        of_token = num_heads * max_blocks * limits.block_size
        if self.batch_invariant:
            scores = _explicit_bytes(TILE * of_token, 0)  # one tile at a time
        else:
            num_in_decodes = num_heads // heads.num_kv_heads * scratch // (2 * heads.head_dim * self.dtype.itemsize)
            scores = _explicit_bytes(num_in_decodes, limits.num_tokens * of_token)
        num_units = limits.num_tokens if self.batch_invariant else min(limits.num_seqs, limits.num_tokens)
        gather_rows = num_units * max_blocks * 2 * heads.num_kv_heads * INT64_BYTES
        # a CPU's matrix product copies the keys
        return 2 * scratch + scores + (num_windows + 2) * gather_rows

    def _of_own_layers(self, windows: Collection[int | None]) -> Collection[int | None]:
        """Return those of these windows that layers with such heads have."""
        spec = self.spec
        if len(spec.attentions) == 1:
            return windows
        pairs = zip(spec.attention_by_layer, spec.layer_windows, strict=True)
        own = {window for attention, window in pairs if attention is self.mixer}
        return [window for window in windows if window in own] or windows

    @property
    def _heads(self) -> HeadShape:
        return self.mixer.heads(self.spec, self.tp_size)

    @property
    def _attention(self) -> type[BatchInvariantAttention | GatherAttention]:
        return BatchInvariantAttention if self.batch_invariant else GatherAttention

    @property
    def _max_partial_blocks(self) -> int:
        limits = self.limits
        return max_partial_blocks(limits.max_model_len, ContextShare(0, limits.context_size, limits.block_size))


class SharingMemory(AttentionMemory):
    """That of `SharingHeads`. One attention computes layers with a source and the source, which counts its memory."""

    def token_numbers(self, *, is_native: bool) -> int:
        numbers = super().token_numbers(is_native=is_native)
        if not is_native:
            return numbers  # which are more copies than there are at a time
        heads, sources = self._heads, {own.source for own in self.spec.layer_heads} - {None}
        of_kinds = (each.heads(self.spec, self.tp_size) for each in self.spec.attentions)
        largest = max(each.num_kv_heads * each.head_dim for each in of_kinds)
        # copies of normalized heads, and keys and values that wait for later layers
        copies = 2 * (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        return numbers + copies + 2 * len(sources) * largest

    def scratch_bytes(self) -> int:
        return super().scratch_bytes() if self._is_first else 0

    def attention_bytes(self, windows: Collection[int | None]) -> int:
        return super().attention_bytes(windows) if self._is_first else 0

    def _of_own_layers(self, windows: Collection[int | None]) -> Collection[int | None]:
        pairs = zip(self.spec.attention_by_layer, self.spec.layer_windows, strict=True)
        own = {window for attention, window in pairs if attention is self.mixer.attention}
        return [window for window in windows if window in own] or windows

    @property
    def _is_first(self) -> bool:
        """Whether no earlier kind of layers has the same attention."""
        kinds: list[Any] = self.spec.mixer_kinds
        return next(each for each in kinds if each.attention is self.mixer.attention) is self.mixer


def exchanged_bytes(memory: MixerMemory, num_heads: int, query_size: int, result_size: int) -> int:
    """Return the bytes of queries and of parts of results, for a rank's heads with so many elements of each."""
    limits = memory.limits
    queries = 2 * limits.num_query_parts * num_heads * query_size * memory.dtype.itemsize
    num_parts = 2 * limits.num_query_parts + limits.context_size + 2
    return limits.num_tokens * (queries + num_parts * num_heads * (result_size + 2) * FLOAT32_BYTES)


def _explicit_bytes(num_in_decodes: int, num_in_chunks: int) -> int:
    """Return the bytes of `ExplicitAttention`'s scores, of their softmax, and of either in another dtype.

    Args:
        num_in_decodes: the largest number of scores of decodes that are computed together.
        num_in_chunks: the same for all chunks of a step, of which some tokens are computed together.
    """
    return 3 * max(num_in_decodes * FLOAT32_BYTES, min(SCORE_BYTES, num_in_chunks * FLOAT32_BYTES))
