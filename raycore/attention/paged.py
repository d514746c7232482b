"""Attention by Triton kernels for GPUs, which read keys and values where they lie in the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.attention.kv_tensors import KVTensors
from raycore.attention.spec import AttentionSpec
from raycore.kernels.gpu.attention import LayerCache, PagedAttention, TokenLocations, chunk_tiles
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors
from raycore.step.transfers import to_device


class TritonAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer.

    Decodes take one kernel, which also rotates queries and keys and fills the cache. Chunks of prompts take two. With
    batch invariance, every token is computed like a decode, whatever chunk it belongs to, which takes longer.
    """

    def __init__(self, spec: AttentionSpec, kv: KVTensors, max_rows: int, *, batch_invariant: bool = False) -> None:
        """`max_rows`: the largest number of decodes in a step, padding included."""
        heads = spec.heads
        self._width = heads.num_heads * heads.head_dim
        self._max_rows = max_rows
        self._batch_invariant = batch_invariant
        self._kernels = PagedAttention(
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=heads.head_dim,
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
        self._layers = [
            LayerCache(
                blocks,
                rope.cosines_and_sines(),
                window,
                None if norm_NH is None else norm_NH.contiguous(),
                None if sinks_N is None else sinks_N.contiguous(),
            )
            for blocks, rope, window, norm_NH, sinks_N in zip(
                kv.blocks, spec.ropes, spec.windows, spec.qk_norms_NH, spec.sinks_N, strict=True
            )
        ]
        self._num_decodes = 0
        self._decodes = self._others = self._all = TokenLocations(*[torch.empty(0)] * 3)
        self._tiles_I4 = torch.empty(0)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._all = TokenLocations(tensors.slots_T, tensors.positions_T, tensors.block_tables_SM)
        if step.is_decoding:
            self._decodes, self._num_decodes = self._all, len(tensors.slots_T)
            return
        self._num_decodes = num_decodes = step.num_decodes
        self._decodes = self._all.part(0, num_decodes)
        self._others = self._all.part(num_decodes, len(tensors.slots_T))
        if num_decodes < len(tensors.slots_T) and not self._batch_invariant:
            self._tiles_I4 = tiles_of_chunks(step, self._kernels.tile_rows, tensors.slots_T.device)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        cache, num_decodes = self._layers[layer], self._num_decodes
        out_TX = qkv_TO.new_empty(len(qkv_TO), self._width)
        if self._batch_invariant:
            self._attend_token_by_token(cache, qkv_TO, out_TX)
            return out_TX
        self._kernels.attend_tokens(cache, qkv_TO[:num_decodes], self._decodes, out_TX[:num_decodes], is_fused=True)
        if num_decodes < len(qkv_TO):
            self._kernels.write_cache(cache, qkv_TO[num_decodes:], self._others)
            self._kernels.attend_chunks(cache, qkv_TO, self._tiles_I4, self._all.block_tables_SM, out_TX)
        return out_TX

    def _attend_token_by_token(self, cache: LayerCache, qkv_TO: Tensor, out_TX: Tensor) -> None:
        self._kernels.write_cache(cache, qkv_TO, self._all)
        for first in range(0, len(qkv_TO), self._max_rows):
            rows = slice(first, first + self._max_rows)
            locations = self._all.part(first, min(first + self._max_rows, len(qkv_TO)))
            self._kernels.attend_tokens(cache, qkv_TO[rows], locations, out_TX[rows], is_fused=False)


def tiles_of_chunks(step: StepInputs, tile_tokens: int, device: torch.device) -> Tensor:
    """Return `chunk_tiles` of the slots of a step that don't decode, on the device."""
    chunks = slice(step.num_decodes, None)
    tiles_I4 = chunk_tiles(
        step.slots[chunks], step.first_rows[chunks], step.counts[chunks], step.starts[chunks], tile_tokens
    )
    return to_device(tiles_I4, device)
