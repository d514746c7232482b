"""Attention whose values are normalized, and which may read the keys and values of an earlier layer.

A layer hands the keys and values of a step's tokens to those that read them. Each of these stores the same numbers in
the same place of the cache once more, so that whatever computes attention knows nothing of it.

Shape suffixes: T tokens of the step, I inputs of the projections, O fused query, key and value rows, X keys and values
of all heads, N heads, H elements of a head.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from raycore.attention.spec import Attention, MixerConstants
from raycore.decoder.attention_mixer import AttentionMixer
from raycore.layers.operations import Norm
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.attention import AttentionHeads
from raycore.models.mixers.sharing import SharingHeads
from raycore.weights.attention_weights import AttentionWeights


class SharingMixer(AttentionMixer):
    """One rank's attention in one layer, with norms of queries, keys and values."""

    def __init__(self, place: PartPlace, weights: AttentionWeights) -> None:
        super().__init__(place, weights)
        self._mixer = cast("SharingHeads", place.mixer)
        self._layer, self._handed = place.index, place.handed
        # norms come before keys are handed on
        self.constants = MixerConstants()
        q_norm_H, k_norm_H = weights.q_norm_H, weights.k_norm_H
        assert q_norm_H is not None, "each layer has them"
        ones_H = torch.ones(self._heads.head_dim, dtype=q_norm_H.dtype)
        self._q_norm = self._head_norm(place, q_norm_H)
        self._k_norm = None if k_norm_H is None else self._head_norm(place, k_norm_H)
        self._v_norm = place.operations.rms_norm(ones_H, place.spec.rms_norm_eps)

    def _head_norm(self, place: PartPlace, weight_H: Tensor) -> Norm:
        ordered_H = self._order.pairs(weight_H.view(1, -1)).view(-1)
        return place.operations.rms_norm(ordered_H, place.spec.rms_norm_eps, place.spec.norm_offset)

    def _rotated_heads(self, place: PartPlace, heads: AttentionHeads) -> list[slice]:
        if place.mixer.source is None:
            return super()._rotated_heads(place, heads)
        return [slice(0, heads.heads(place.spec, place.ranks.size).num_heads)]

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        heads, qkv_TO = self._heads, self._qkv(x_TI)
        num_queries, num_keys = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
        q_TO = self._normed(self._q_norm, qkv_TO[:, :num_queries])
        if self._mixer.source is not None:
            kv_TX = self._handed.kept(self._mixer.source)
        else:
            assert self._k_norm is not None, "the layer has keys of its own"
            k_TO = qkv_TO[:, num_queries : num_queries + num_keys]
            if self._mixer.values_are_keys:
                v_TO = self._order.stored(k_TO.reshape(-1, heads.head_dim)).view(k_TO.shape)
            else:
                v_TO = qkv_TO[:, num_queries + num_keys :]
            kv_TX = torch.cat([self._normed(self._k_norm, k_TO), self._normed(self._v_norm, v_TO)], 1)
            if self._mixer.is_source:
                self._handed.keep(self._layer, kv_TX)
        return attention(self._stage_index, torch.cat([q_TO, kv_TX], 1))

    def _normed(self, norm: Norm, heads_TO: Tensor) -> Tensor:
        """Return heads that are normalized one by one."""
        return norm(heads_TO.reshape(-1, self._heads.head_dim)).view(heads_TO.shape)
