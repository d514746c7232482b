"""What plain torch does before attention: normalizes and rotates queries and keys, and stores keys and values."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from raycore.attention.context_share import ContextShare
from raycore.attention.head_rotations import HeadRotations
from raycore.attention.paged_cache import PagedCache
from raycore.attention.spec import AttentionSpec
from raycore.layers.norm import RMSNorm
from raycore.step.batch import StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors


class CacheWriter:
    """Prepares a step's queries, keys and values, layer by layer: call `begin`, then the object itself."""

    def __init__(
        self, spec: AttentionSpec, kv: PagedCache, share: ContextShare | None = None, *, batch_invariant: bool = False
    ) -> None:
        """
        Args:
            share: which tokens' keys and values are stored. None: all.
            batch_invariant: make the bits of each token's queries and keys independent of the other tokens.
        """
        self._heads = spec.heads
        self._device = spec.device
        self._kv = kv
        self._norms = [
            None
            if weight_NH is None
            else spec.copies(partial(RMSNorm, weight_NH, spec.norm_eps, batch_invariant, spec.norm_offset))
            for weight_NH in spec.qk_norms_NH
        ]
        self._rotations = HeadRotations(spec.ropes, batch_invariant=batch_invariant)
        self._share = share
        self._write_rows = torch.empty(0)
        self._owned: Tensor | None = None
        """The rows of the tokens whose keys and values are stored. None: all."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        slots_T, positions_T = step.token_slots, step.positions
        if self._share is not None:
            owned = np.flatnonzero(self._share.owns(positions_T))
            slots_T, positions_T = slots_T[owned], self._share.num_owned(positions_T[owned])
            self._owned = to_device(owned, self._device)
        block_ids_T = step.block_tables[slots_T, positions_T // self._kv.block_size]
        write_rows = self._kv.write_rows(block_ids_T, positions_T)
        self._write_rows = to_device(write_rows, self._device)
        self._rotations.begin(tensors.turning_positions)

    def __call__(self, layer: int, qkv_TO: Tensor) -> None:
        """Normalize, if the model does, and rotate queries and keys in place, and store keys and values."""
        heads = self._heads
        heads_TNH = qkv_TO.view(len(qkv_TO), -1, heads.head_dim)
        rotated_TNH = heads_TNH[:, : heads.num_heads + heads.num_kv_heads]
        norm = self._norms[layer]
        if norm is not None:
            norm.apply_(rotated_TNH)
        self._rotations.rotate_(layer, rotated_TNH)
        self._store(layer, heads_TNH[:, heads.num_heads :])

    def _store(self, layer: int, kv_TNH: Tensor) -> None:
        """Store the keys and values of all tokens of the step."""
        if self._owned is not None:
            kv_TNH = kv_TNH.index_select(0, self._owned)
        self._kv.rows[layer].index_copy_(0, self._write_rows, kv_TNH.reshape(-1, self._heads.head_dim))
