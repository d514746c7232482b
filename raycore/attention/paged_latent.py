"""Latent attention by Triton kernels for GPUs, which read latents where they lie in the cache."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.paged import tiles_of_chunks
from raycore.attention.spec import AttentionSpec
from raycore.kernels.gpu.attention import TokenLocations
from raycore.kernels.gpu.latent_attention import LatentAttentionKernels, LatentLayer
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors


class TritonLatentAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer.

    With batch invariance, every token is computed like a decode, whatever chunk it belongs to, which takes longer.
    """

    def __init__(self, spec: AttentionSpec, kv: LatentTensors, max_rows: int, *, batch_invariant: bool = False) -> None:
        """`max_rows`: the largest number of decodes in a step, padding included."""
        heads = spec.heads
        assert heads.latent_rank is not None, "the heads are those of latent attention"
        self._width = heads.num_heads * heads.latent_rank
        self._max_rows = max_rows
        self._batch_invariant = batch_invariant
        self._kernels = LatentAttentionKernels(
            num_heads=heads.num_heads,
            rank=heads.latent_rank,
            width=heads.head_dim,
            block_size=kv.block_size,
            device=spec.device,
            scale=spec.scale,
            norm_eps=spec.norm_eps,
            dtype=spec.dtype,
            max_rows=max_rows,
            batch_invariant=batch_invariant,
        )
        self._layers = [
            LatentLayer(rows_XW, rope.cosines_and_sines(), spec.copies(partial(_norm, weight_1R)))
            for rows_XW, rope, weight_1R in zip(kv.rows, spec.ropes, spec.qk_norms_NH, strict=True)
        ]
        self._num_decodes = 0
        self._all = TokenLocations(*[torch.empty(0)] * 3)
        self._tiles_I4 = torch.empty(0)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._all = TokenLocations(tensors.slots_T, tensors.positions_T, tensors.block_tables_SM)
        self._num_decodes = len(tensors.slots_T) if step.is_decoding else step.num_decodes
        if self._num_decodes == len(tensors.slots_T) or self._batch_invariant:
            return
        self._tiles_I4 = tiles_of_chunks(step, self._kernels.tile_tokens, tensors.slots_T.device)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        own, num_tokens = self._layers[layer], len(qkv_TO)
        out_TX = qkv_TO.new_empty(num_tokens, self._width)
        self._kernels.prepare(own, qkv_TO, self._all)
        num_alone = num_tokens if self._batch_invariant else self._num_decodes
        for first in range(0, num_alone, self._max_rows):
            rows = slice(first, min(first + self._max_rows, num_alone))
            self._kernels.attend_tokens(own, qkv_TO[rows], self._all.part(rows.start, rows.stop), out_TX[rows])
        if num_alone < num_tokens:
            self._kernels.attend_chunks(own, qkv_TO, self._tiles_I4, self._all.block_tables_SM, out_TX)
        return out_TX


def _norm(weight_1R: Tensor | None) -> Tensor:
    assert weight_1R is not None, "latents are normalized"
    return weight_1R[0].contiguous()
