"""What plain torch does before latent attention: normalizes latents, rotates queries and keys, and stores the keys.

Shape suffixes: T tokens, N query heads and the key, W elements of a query or of a key, R those of a latent.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor

from raycore.attention.context_share import ContextShare
from raycore.attention.head_rotations import HeadRotations
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.spec import AttentionSpec
from raycore.layers.norm import RMSNorm
from raycore.step.batch import StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors


class LatentWriter:
    """Prepares a step's queries and keys, layer by layer: call `begin`, then the object itself."""

    def __init__(
        self, spec: AttentionSpec, kv: LatentTensors, share: ContextShare | None = None, *, batch_invariant: bool
    ) -> None:
        """
        Args:
            share: which tokens' keys are stored. None: all.
            batch_invariant: make the bits of each token's queries and key independent of the other tokens.
        """
        assert spec.heads.latent_rank is not None, "the heads are those of latent attention"
        self._width, self._rank = spec.heads.head_dim, spec.heads.latent_rank
        self._device = spec.device
        self._kv = kv
        self._share = share
        self._norms = [
            spec.copies(partial(_norm, weight_1R, spec.norm_eps, batch_invariant)) for weight_1R in spec.qk_norms_NH
        ]
        self._rotations = HeadRotations(spec.ropes, batch_invariant=batch_invariant)
        self._write_rows = torch.empty(0)
        self._owned: Tensor | None = None
        """The rows of the tokens whose keys are stored. None: all."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        slots_T, positions_T = step.token_slots, step.positions
        if self._share is not None:
            owned = np.flatnonzero(self._share.owns(positions_T))
            slots_T, positions_T = slots_T[owned], self._share.num_owned(positions_T[owned])
            self._owned = to_device(owned, self._device)
        block_ids_T = step.block_tables[slots_T, positions_T // self._kv.block_size]
        self._write_rows = to_device(self._kv.write_rows(block_ids_T, positions_T), self._device)
        self._rotations.begin(tensors.positions_T)

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Normalize latents and rotate queries and keys in place, and store keys. Returns a view [T, N, W]."""
        heads_TNW = qkv_TO.view(len(qkv_TO), -1, self._width)
        self._norms[layer].apply_(heads_TNW[:, -1, : self._rank])
        self._rotations.rotate_(layer, heads_TNW[..., self._rank :])
        keys_TW = heads_TNW[:, -1]
        if self._owned is not None:
            keys_TW = keys_TW.index_select(0, self._owned)
        self._kv.rows[layer].index_copy_(0, self._write_rows, keys_TW)
        return heads_TNW


def _norm(weight_1R: Tensor | None, eps: float, batch_invariant: bool) -> RMSNorm:
    assert weight_1R is not None, "latents are normalized"
    return RMSNorm(weight_1R[0], eps, batch_invariant)
