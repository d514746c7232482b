"""Latent attention over a paged cache in plain torch: one sequence after the other.

A query head has been brought to the space of latents, so its scores are products with the latents and the rotated keys
themselves, which all heads share, and its result is a weighted sum of latents.

Shape suffixes: T tokens, M query heads of all workers, N those of this worker, W elements of a query or of a key, R
those of a latent, L keys, P parts, X anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from raycore.attention.cache_writer import CacheWriter
from raycore.attention.context_share import ContextShare
from raycore.attention.explicit import at_a_time
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.spec import AttentionSpec
from raycore.attention.torch_partial import merge
from raycore.step.batch import Ints, StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors


class LatentWriter(CacheWriter):
    """Prepares a step's queries and keys, layer by layer: call `begin`, then the object itself."""

    def __call__(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize latents and rotate queries and keys in place, and store keys."""
        rank, norm = self._heads.latent_rank, self._norms[layer]
        assert rank is not None, "the heads are those of latent attention"
        assert norm is not None, "latents are normalized"
        heads_TNW = qkv_TO.view(len(qkv_TO), -1, self._heads.head_dim)
        norm.apply_(heads_TNW[:, -1, :rank])
        self._rotations.rotate_(layer, heads_TNW[..., rank:])
        self._store(layer, heads_TNW[:, -1])


@dataclass(frozen=True)
class _Chunk:
    """A sequence's tokens in the step."""

    first_row: int
    ends_T: Ints
    """How many of the worker's keys each token sees: the first ones."""
    block_ids: Tensor
    """Those with the keys that the last of them sees."""


class TorchPartialLatentAttention:
    """Implements `PartialAttention`. A head's part has R numbers, the results, and the natural logarithm of the sum of
    the exponentials of the scores."""

    def __init__(
        self, spec: AttentionSpec, kv: LatentTensors, share: ContextShare, *, batch_invariant: bool = False
    ) -> None:
        """`batch_invariant`: make a token's bits independent of the other tokens, by computing it alone."""
        heads = spec.heads
        assert heads.latent_rank is not None, "the heads are those of latent attention"
        self._num_heads, self._width, self._rank = heads.num_heads, heads.head_dim, heads.latent_rank
        self._scale, self._dtype, self._device = spec.scale, spec.dtype, spec.device
        self._kv = kv
        self._share = share
        self._batch_invariant = batch_invariant
        self._writer = LatentWriter(spec, kv, share, batch_invariant=batch_invariant)
        self._chunks: list[_Chunk] = []

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._writer.begin(step, tensors)
        _, ends_T = self._share.seen(step.positions, None)
        self._chunks = []
        for slot, count, first_row in zip(step.slots, step.counts, step.first_rows.tolist(), strict=True):
            own_ends_T = ends_T[first_row : first_row + count]
            num_blocks = -(-int(own_ends_T[-1]) // self._kv.block_size)
            block_ids = to_device(step.block_tables[slot, :num_blocks].astype(np.int64), self._device)
            self._chunks.append(_Chunk(first_row, own_ends_T, block_ids))

    def store(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize latents and rotate queries and keys in place, and store the worker's share of the keys."""
        self._writer(layer, qkv_TO)

    def attend(self, layer: int, q_TX: Tensor) -> Tensor:
        """Return parts of attention, float32[T, M · (R + 1)]."""
        q_TMW = q_TX.view(len(q_TX), -1, self._width)
        part_TMX = q_TX.new_empty((len(q_TX), q_TMW.shape[1], self._rank + 1), dtype=torch.float32)
        for rows, scores_TML, keys_LW in self._scores(layer, q_TMW):
            self._attend(scores_TML, keys_LW, part_TMX[rows])
        return part_TMX.flatten(1)

    def merge(self, layer: int, parts_PTX: Tensor) -> Tensor:
        """Return attention to all keys, [T, N · R]."""
        parts_PTNX = parts_PTX.view(*parts_PTX.shape[:2], self._num_heads, -1)
        return merge(parts_PTNX, None, batch_invariant=self._batch_invariant).to(self._dtype).flatten(1)

    def _scores(self, layer: int, q_TMW: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield, for some tokens of a sequence at a time: their rows, their scores, float32[T, M, L], and the keys
        [L, W] that the last of them sees. Scores of keys that a token doesn't see are minus infinity."""
        num_heads = q_TMW.shape[1]
        for chunk in self._chunks:
            all_LW = self._kv.blocks[layer].index_select(0, chunk.block_ids).view(-1, self._width)
            size = 1 if self._batch_invariant else at_a_time(num_heads * max(1, len(all_LW)))
            for first in range(0, len(chunk.ends_T), size):
                ends_T = chunk.ends_T[first : first + size]
                rows = slice(chunk.first_row + first, chunk.first_row + first + len(ends_T))
                keys_LW = all_LW[: int(ends_T[-1])]
                # a copy: how numbers are aligned may decide in which order products are added up
                q_XW = q_TMW[rows].clone(memory_format=torch.contiguous_format).view(-1, self._width)
                scores_XL = torch.mm(q_XW, keys_LW.t()).float().mul_(self._scale)
                scores_TML = scores_XL.view(len(ends_T), num_heads, len(keys_LW))
                if ends_T[0] < len(keys_LW):
                    keys_L = torch.arange(len(keys_LW), device=self._device)
                    hidden_TL = keys_L >= to_device(ends_T, self._device)[:, None]
                    scores_TML.masked_fill_(hidden_TL[:, None], -torch.inf)
                yield rows, scores_TML, keys_LW

    def _attend(self, scores_TML: Tensor, keys_LW: Tensor, part_TMX: Tensor) -> None:
        """Write the parts of some tokens of a sequence to `part_TMX`."""
        if not len(keys_LW):
            part_TMX[..., :-1] = 0.0
            part_TMX[..., -1] = -torch.inf
            return
        highest_TM1 = scores_TML.amax(-1, keepdim=True)
        shift_TM1 = highest_TM1.masked_fill(highest_TM1 == -torch.inf, 0.0)  # a token may see no key
        weights_TML = scores_TML.sub_(shift_TM1).exp_()
        total_TM1 = weights_TML.sum(-1, keepdim=True)
        out_XR = torch.mm(weights_TML.to(self._dtype).view(-1, len(keys_LW)), keys_LW[:, : self._rank])
        part_TMX[..., :-1] = out_XR.view(*scores_TML.shape[:2], self._rank)
        part_TMX[..., :-1].div_(total_TM1.clamp_min(torch.finfo(torch.float32).tiny))
        part_TMX[..., -1:] = total_TM1.log_().add_(shift_TM1)


class TorchLatentAttention(TorchPartialLatentAttention):
    """Computes the attention of one step at a time: call `begin`, then the object itself for every layer.

    The worker has all latents, so its parts are the results.
    """

    def __init__(self, spec: AttentionSpec, kv: LatentTensors, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: make a token's bits independent of the other tokens, by computing it alone."""
        super().__init__(spec, kv, ContextShare(0, 1, kv.block_size), batch_invariant=batch_invariant)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, N · R]."""
        self.store(layer, qkv_TO)
        q_TNW = qkv_TO.view(len(qkv_TO), -1, self._width)[:, :-1]
        out_TNR = qkv_TO.new_empty(*q_TNW.shape[:2], self._rank)
        for rows, scores_TNL, keys_LW in self._scores(layer, q_TNW):
            weights_XL = scores_TNL.softmax(-1).to(self._dtype).view(-1, len(keys_LW))
            out_TNR[rows] = torch.mm(weights_XL, keys_LW[:, : self._rank]).view(*scores_TNL.shape[:2], -1)
        return out_TNR.flatten(1)
