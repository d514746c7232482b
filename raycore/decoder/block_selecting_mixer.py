"""Attention to selected blocks of tokens as a layer's mixer. `raycore.attention.block_selection` selects them.

Shape suffixes: those of `raycore.decoder.attention_mixer`, K elements of an indexer's key, and of one of its queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from raycore.attention.spec import Attention
from raycore.decoder.attention_mixer import AttentionMixer
from raycore.decoder.mixer import plain
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.block_selecting import BlockSelectingHeads
from raycore.weights.attention_weights import AttentionWeights


@dataclass(kw_only=True)
class BlockSelectingWeights(AttentionWeights):
    """The weights of attention and of an indexer in one layer on one rank."""

    index_XD: Tensor
    """This rank's queries, and then the key."""
    index_q_norm_K: Tensor
    index_k_norm_K: Tensor

    NAMES: ClassVar[Mapping[str, str]] = {
        **AttentionWeights.NAMES,
        "index_XD": "self_attn.indexer.qk_proj.weight",
        "index_q_norm_K": "self_attn.indexer.q_norm.weight",
        "index_k_norm_K": "self_attn.indexer.k_norm.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = (*AttentionWeights.MULTIPLIED, "index_XD")


class BlockSelectingMixer(AttentionMixer):
    """One rank's attention in one layer, with the indexer."""

    _PARTS: ClassVar[Mapping[str, str]] = {**AttentionMixer._PARTS, "_index": "indexer.qk_proj"}

    def __init__(self, place: PartPlace, weights: BlockSelectingWeights) -> None:
        super().__init__(place, weights)
        spec, mixer, operations = place.spec, place.mixer, place.operations
        assert isinstance(mixer, BlockSelectingHeads)
        self._index_norms_K = weights.index_q_norm_K, weights.index_k_norm_K
        self._index_dim = mixer.indexer.head_dim
        self._index = place.adapt(operations.linear(weights.index_XD), "index", None)
        norms = [operations.rms_norm(each_K, spec.rms_norm_eps, spec.norm_offset) for each_K in self._index_norms_K]
        self._index_q_norm, self._index_k_norm = norms

    def __call__(self, x_TI: Tensor, attention: Attention) -> Tensor:
        """Return the result of attention, for the input of all projections. Stores keys and values, and indexers'."""
        queries_TX, key_TK = self._index(x_TI).tensor_split([-self._index_dim], 1)
        queries_XK = self._index_q_norm(queries_TX.reshape(-1, self._index_dim))
        beside = queries_XK.view(len(x_TI), -1), self._index_k_norm(key_TK.contiguous())
        return attention(self._stage_index, torch.cat([self._qkv(x_TI), *beside], 1))

    def weights(self) -> BlockSelectingWeights:
        q_norm_K, k_norm_K = self._index_norms_K
        own = vars(super().weights())
        return BlockSelectingWeights(
            **own, index_XD=plain(self._index), index_q_norm_K=q_norm_K, index_k_norm_K=k_norm_K
        )
