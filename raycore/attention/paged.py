"""Attention by Triton kernels for GPUs, which read keys and values where they lie in the cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from raycore.attention.context_share import ContextShare
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.spec import AttentionSpec
from raycore.attention.torch_partial import merge_heads
from raycore.kernels.gpu.attention import LayerCache, PagedAttention, TokenLocations, chunk_tiles
from raycore.step.batch import StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors


class TritonAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer.

    Decodes take one kernel, which also rotates queries and keys and fills the cache. Chunks of prompts take two. With
    batch invariance, every token is computed like a decode, whatever chunk it belongs to, which takes longer.
    """

    def __init__(self, spec: AttentionSpec, kv: KVTensors, max_rows: int, *, batch_invariant: bool = False) -> None:
        """`max_rows`: the largest number of decodes in a step, padding included.

        If three positions rotate a token, they do so alike in all layers.
        """
        heads = spec.heads
        self._width = heads.num_heads * heads.head_dim
        self._max_rows = max_rows
        self._batch_invariant = batch_invariant
        self._kernels = _kernels(spec, kv, heads.num_heads, max_rows, batch_invariant=batch_invariant)
        self._layers = _layers(spec, kv)
        self._ropes = spec.ropes
        self._axes_T3: Tensor | None = None
        self._ends_T: Tensor | None = None
        self._num_decodes = 0
        self._decodes = self._others = self._all = TokenLocations(*[torch.empty(0)] * 3)
        self._tiles_I4 = torch.empty(0)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._axes_T3, self._ends_T = tensors.axes_T3, tensors.ends_T
        self._num_decodes = len(tensors.slots_T) if step.is_decoding else step.num_decodes
        self._locate(TokenLocations(tensors.slots_T, tensors.positions_T, tensors.block_tables_SM))
        if step.is_decoding:
            return
        num_decodes = self._num_decodes
        if num_decodes < len(tensors.slots_T) and not self._batch_invariant:
            self._tiles_I4 = tiles_of_chunks(step, self._kernels.tile_rows, tensors.slots_T.device)

    def _locate(self, locations: TokenLocations) -> None:
        num_rows, num_decodes = len(locations.slots_T), self._num_decodes
        self._all = self._decodes = locations
        if num_decodes < num_rows:
            self._decodes = locations.part(0, num_decodes)
            self._others = locations.part(num_decodes, num_rows)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        if layer == 0 and self._axes_T3 is not None:
            # not in `begin`, so that a graph that was captured rotates by the positions of its own step
            turns_TH = self._ropes[0].cosines_and_sines_of(self._axes_T3).contiguous()
            self._locate(replace(self._all, turns_TH=turns_TH))
        cache, num_decodes = self._layers[layer], self._num_decodes
        out_TX = torch.empty((len(qkv_TO), self._width), dtype=qkv_TO.dtype, device=qkv_TO.device)
        if self._batch_invariant:
            self._attend_token_by_token(cache, qkv_TO, out_TX)
            return out_TX
        if num_decodes:
            self._kernels.attend_tokens(cache, qkv_TO[:num_decodes], self._decodes, out_TX[:num_decodes], is_fused=True)
        if num_decodes < len(qkv_TO):
            self._kernels.write_cache(cache, qkv_TO[num_decodes:], self._others)
            self._kernels.attend_chunks(cache, qkv_TO, self._tiles_I4, self._all.block_tables_SM, out_TX, self._ends_T)
        return out_TX

    def _attend_token_by_token(self, cache: LayerCache, qkv_TO: Tensor, out_TX: Tensor) -> None:
        self._kernels.write_cache(cache, qkv_TO, self._all)
        for first in range(0, len(qkv_TO), self._max_rows):
            rows = slice(first, first + self._max_rows)
            locations = self._all.part(first, min(first + self._max_rows, len(qkv_TO)))
            self._kernels.attend_tokens(cache, qkv_TO[rows], locations, out_TX[rows], is_fused=False)


class TritonPartialAttention:
    """Attention to one worker's share of the keys and values. Implements `PartialAttention`.

    A head's part is that of `TorchPartialAttention`. Decodes and chunks are computed as `TritonAttention` does, but
    queries and keys are always rotated before.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        kv: KVTensors,
        share: ContextShare,
        num_query_heads: int,
        max_rows: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """
        Args:
            num_query_heads: those of all workers that have the same key-value heads.
            max_rows: the largest number of decodes that are computed at once.
        """
        self._spec = spec
        self._num_query_heads = num_query_heads
        self._max_rows = max_rows
        self._batch_invariant = batch_invariant
        self._writer = _kernels(spec, kv, spec.heads.num_heads, 0, batch_invariant=batch_invariant)
        self._kernels = _kernels(spec, kv, num_query_heads, max_rows, batch_invariant=batch_invariant)
        self._sinks_N = [None if sinks_N is None else spec.copies(sinks_N.float) for sinks_N in spec.sinks_N]
        # they count once
        layers = _layers(replace(spec, sinks_N=[None] * len(spec.sinks_N)), kv)
        self._layers = [replace(each, num_owners=share.size, owner=share.index) for each in layers]
        self._num_alone = 0
        self._all = TokenLocations(*[torch.empty(0)] * 3)
        self._tiles_I4 = torch.empty(0)
        self._ends_T: Tensor | None = None

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        turns_TH, num_tokens = None, len(tensors.slots_T)
        if tensors.axes_T3 is not None:
            turns_TH = self._spec.ropes[0].cosines_and_sines_of(tensors.axes_T3).contiguous()
        self._all = TokenLocations(tensors.slots_T, tensors.positions_T, tensors.block_tables_SM, turns_TH)
        self._ends_T = tensors.ends_T
        self._num_alone = num_tokens if self._batch_invariant or step.is_decoding else step.num_decodes
        if self._num_alone < num_tokens:
            self._tiles_I4 = tiles_of_chunks(step, self._kernels.tile_rows, tensors.slots_T.device)

    def store(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize and rotate queries and keys in place, and store the worker's share of keys and values."""
        self._writer.write_cache(self._layers[layer], qkv_TO, self._all)

    def attend(self, layer: int, q_TX: Tensor) -> Tensor:
        """Return parts of attention, float32[T, M · (H + 1)]."""
        cache, num_tokens = self._layers[layer], len(q_TX)
        out_TX = torch.empty_like(q_TX, dtype=torch.float32)
        logs_TM = out_TX.new_empty(num_tokens, self._num_query_heads)
        for first in range(0, self._num_alone, self._max_rows):
            rows = slice(first, min(first + self._max_rows, self._num_alone))
            place = self._all.part(rows.start, rows.stop), out_TX[rows]
            self._kernels.attend_tokens(cache, q_TX[rows], *place, is_fused=False, logs_BN=logs_TM[rows])
        if self._num_alone < num_tokens:
            tables_SM = self._all.block_tables_SM
            self._kernels.attend_chunks(cache, q_TX, self._tiles_I4, tables_SM, out_TX, self._ends_T, logs_TM)
        out_TMH = out_TX.view(num_tokens, self._num_query_heads, -1)
        return torch.cat([out_TMH, logs_TM[..., None]], 2).flatten(1)

    def merge(self, layer: int, parts_PTX: Tensor) -> Tensor:
        """Return attention to all keys, [T, N · H]."""
        return merge_heads(self._spec, parts_PTX, self._sinks_N[layer], batch_invariant=self._batch_invariant)


def _kernels(
    spec: AttentionSpec, kv: KVTensors, num_heads: int, max_rows: int, *, batch_invariant: bool
) -> PagedAttention:
    """Return kernels for so many query heads."""
    return PagedAttention(
        num_heads=num_heads,
        num_kv_heads=spec.heads.num_kv_heads,
        head_dim=spec.heads.head_dim,
        block_size=kv.block_size,
        device=spec.device,
        scale=spec.scale,
        softcap=spec.softcap,
        norm_eps=spec.norm_eps,
        norm_offset=spec.norm_offset,
        dtype=spec.dtype,
        max_rows=max_rows,
        batch_invariant=batch_invariant,
    )


def _layers(spec: AttentionSpec, kv: KVTensors) -> list[LayerCache]:
    return [
        LayerCache(
            blocks,
            rope.cosines_and_sines(),
            window,
            None if norm_NH is None else spec.copies(norm_NH.contiguous),
            None if sinks_N is None else spec.copies(sinks_N.contiguous),
        )
        for blocks, rope, window, norm_NH, sinks_N in zip(
            kv.blocks, spec.ropes, spec.windows, spec.qk_norms_NH, spec.sinks_N, strict=True
        )
    ]


def tiles_of_chunks(step: StepInputs, tile_tokens: int, device: torch.device) -> Tensor:
    """Return `chunk_tiles` of the slots of a step that don't decode, on the device."""
    chunks = slice(step.num_decodes, None)
    tiles_I4 = chunk_tiles(
        step.slots[chunks], step.first_rows[chunks], step.counts[chunks], step.starts[chunks], tile_tokens
    )
    return to_device(tiles_I4, device)
