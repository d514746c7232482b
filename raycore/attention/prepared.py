"""What plain torch does to queries and keys before attention, for models whose order of operations no kernel knows."""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.attention.head_rotations import HeadRotations
from raycore.attention.spec import Attention, AttentionSpec
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors


class PreparedAttention:
    """Multiplies queries by a factor that depends on their position, and rotates heads before their norms, in place.

    Then another attention computes the rest. A model may need one of the two.
    """

    def __init__(self, attention: Attention, spec: AttentionSpec, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: make the bits of each token's queries and keys independent of the other tokens."""
        self._attention = attention
        self._heads = spec.heads
        ropes = spec.early_ropes
        self._rotations = None if ropes is None else HeadRotations(ropes, batch_invariant=batch_invariant)
        self._query_scales_P, self._is_scaled = spec.query_scales_P, spec.is_scaled
        self._positions_T = torch.empty(0)
        self._scales_T1 = torch.empty(0)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`."""
        self._attention.begin(step, tensors)
        self._positions_T = tensors.positions_T

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        """Compute attention in one layer. Returns [T, query heads · H]."""
        if layer == 0:
            # not in `begin`, so that a graph that was captured reads the positions of its own step
            self._look_up_positions()
        heads = self._heads
        if self._query_scales_P is not None and (self._is_scaled is None or self._is_scaled[layer]):
            qkv_TO[:, : heads.num_heads * heads.head_dim].mul_(self._scales_T1)
        if self._rotations is not None:
            heads_TNH = qkv_TO.view(len(qkv_TO), -1, heads.head_dim)[:, : heads.num_heads + heads.num_kv_heads]
            self._rotations.rotate_(layer, heads_TNH)
        return self._attention(layer, qkv_TO)

    def _look_up_positions(self) -> None:
        if self._query_scales_P is not None:
            self._scales_T1 = self._query_scales_P.index_select(0, self._positions_T)[:, None]
        if self._rotations is not None:
            self._rotations.begin(self._positions_T)
