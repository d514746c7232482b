"""Attention whose query, key and value projections share a tensor that has the rows of one key-value head after the
other: those of its query heads, of its key and of its value.

Shape suffixes: O fused query, key and value rows, K key-value heads, H elements of a head, X anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from raycore.decoder.attention_mixer import AttentionMixer, reorder_heads_, row_tensors
from raycore.layers.part_place import PartPlace
from raycore.layers.rope import PairOrder
from raycore.models.mixers.attention import GroupedHeads
from raycore.models.mixers.spec import HeadShape
from raycore.models.spec import ModelSpec
from raycore.parts.adapters.weights import LoraLinear
from raycore.weights.attention_weights import AttentionWeights


class GroupedMixer(AttentionMixer):
    """One rank's attention in one layer. It has the rows of all queries, then those of keys, then those of values."""

    def __init__(self, place: PartPlace, weights: AttentionWeights) -> None:
        heads: GroupedHeads = place.mixer
        self._order_O = _order(heads.heads(place.spec, place.ranks.size))
        _reorder_(weights, self._order_O)
        super().__init__(place, weights)

    def weights(self) -> AttentionWeights:
        """Return the weights that the mixer was made of."""
        stored = super().weights()
        _reorder_(stored, self._order_O.argsort())
        return stored

    @staticmethod
    def reorder_adapter_(linears: Mapping[str, LoraLinear], spec: ModelSpec, index: int, tp_size: int) -> None:
        heads = cast("GroupedHeads", spec.attention_by_layer[index])
        shape, pairs = heads.heads(spec, tp_size), PairOrder(spec.rotations[index], heads.head_dim).pairs
        rotated = [slice(0, shape.num_heads + shape.num_kv_heads)]
        for part in linears["qkv"].parts if "qkv" in linears else ():
            rows_OX = part.b_RO.t()
            rows_OX.copy_(rows_OX[_order(shape)])
            reorder_heads_(rows_OX, rotated, heads.head_dim, pairs)


def _order(shape: HeadShape) -> Tensor:
    """Return which row of a checkpoint each row is, in the order of queries, keys and values."""
    num_rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    rows_KXH = torch.arange(num_rows).view(shape.num_kv_heads, -1, shape.head_dim)
    queries, keys, values = torch.split(rows_KXH, [shape.group, 1, 1], 1)
    return torch.cat([queries.flatten(), keys.flatten(), values.flatten()])


def _reorder_(weights: AttentionWeights, order_O: Tensor) -> None:
    for rows_OX in row_tensors(weights.qkv_OD, weights.qkv_bias_O):
        rows_OX.copy_(rows_OX[order_O.to(rows_OX.device)])
