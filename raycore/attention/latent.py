"""Latent attention over a paged cache in plain torch: one sequence after the other.

A query head has been brought to the space of latents, so its scores are products with the latents and the rotated keys
themselves, which all heads share, and its result is a weighted sum of latents.

Shape suffixes: T tokens, N query heads, W elements of a query or of a key, R those of a latent, M blocks of a sequence,
L keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raycore.attention.explicit import rows_at_a_time
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.latent_writer import LatentWriter
from raycore.attention.spec import AttentionSpec
from raycore.step.batch import StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors


@dataclass(frozen=True)
class _Chunk:
    """A sequence's tokens in the step."""

    first_row: int
    count: int
    start: int
    """The position of the first of them."""
    block_ids_M: Tensor
    """Those with the keys that the last of them sees."""


class TorchLatentAttention:
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer."""

    def __init__(self, spec: AttentionSpec, kv: LatentTensors, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: make a token's bits independent of the other tokens, by computing it alone."""
        heads = spec.heads
        assert heads.latent_rank is not None, "the heads are those of latent attention"
        self._num_heads, self._width, self._rank = heads.num_heads, heads.head_dim, heads.latent_rank
        self._scale = spec.scale
        self._kv = kv
        self._device = spec.device
        self._batch_invariant = batch_invariant
        self._writer = LatentWriter(spec, kv, batch_invariant=batch_invariant)
        self._chunks: list[_Chunk] = []

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        block_size, tables = self._kv.block_size, step.block_tables
        self._writer.begin(step, tensors)
        self._chunks = [
            _Chunk(
                first_row,
                count,
                start,
                to_device(tables[slot, : -(-(start + count) // block_size)].astype(np.int64), self._device),
            )
            for slot, first_row, count, start in zip(
                *(each.tolist() for each in (step.slots, step.first_rows, step.counts, step.starts)), strict=True
            )
        ]

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, N · R]."""
        heads_TNW = self._writer(layer, qkv_TO)
        out_TNR = qkv_TO.new_empty(len(qkv_TO), self._num_heads, self._rank)
        for chunk in self._chunks:
            self._attend(chunk, self._kv.blocks[layer], heads_TNW[:, :-1], out_TNR)
        return out_TNR.flatten(1)

    def _attend(self, chunk: _Chunk, blocks: Tensor, q_TNW: Tensor, out_TNR: Tensor) -> None:
        keys_LW = blocks.index_select(0, chunk.block_ids_M).view(-1, self._width)
        size = 1 if self._batch_invariant else rows_at_a_time(self._num_heads, len(keys_LW))
        for first in range(0, chunk.count, size):
            num_tokens = min(size, chunk.count - first)
            rows = slice(chunk.first_row + first, chunk.first_row + first + num_tokens)
            num_keys = chunk.start + first + num_tokens
            out_TNR[rows] = self._attended(q_TNW[rows], keys_LW[:num_keys])

    def _attended(self, q_TNW: Tensor, keys_LW: Tensor) -> Tensor:
        """Attention of a sequence's last tokens to all of its keys."""
        num_tokens = len(q_TNW)
        # a copy: how numbers are aligned may decide in which order products are added up
        q_XW = q_TNW.clone(memory_format=torch.contiguous_format).view(-1, self._width)
        scores_TNL = torch.mm(q_XW, keys_LW.t()).float().mul_(self._scale).view(num_tokens, self._num_heads, -1)
        if num_tokens > 1:
            hidden_TL = scores_TNL.new_ones(num_tokens, len(keys_LW), dtype=torch.bool)
            hidden_TL = hidden_TL.triu_(len(keys_LW) - num_tokens + 1)
            scores_TNL.masked_fill_(hidden_TL[:, None], -torch.inf)
        weights_XL = scores_TNL.softmax(-1).to(q_TNW.dtype).view(-1, len(keys_LW))
        return torch.mm(weights_XL, keys_LW[:, : self._rank]).view(num_tokens, self._num_heads, -1)
