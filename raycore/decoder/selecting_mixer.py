"""Latent attention to selected tokens as a layer's mixer of tokens. `raycore.attention.selected` has what selects them.

Shape suffixes: those of `raycore.decoder.latent_mixer`, Q size of the vector that queries are made of, K elements of an
indexer's key, and of one of its queries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from raycore.decoder.latent_mixer import LatentMixer
from raycore.decoder.mixer import plain
from raycore.layers.linear import Linear
from raycore.layers.operations import Norm
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.selecting import SelectingHeads
from raycore.weights.latent_weights import LatentWeights

_KEY_NORM_EPS = 1e-6


@dataclass
class SelectingWeights(LatentWeights):
    """The weights of latent attention and of an indexer in one layer on one rank. All ranks have the same indexer, and
    layers without one have None for it."""

    index_q_XQ: Tensor | None = None
    """Its queries, head by head."""
    index_inputs_XD: Tensor | None = None
    """Its key, and then the weight of each of its heads."""
    index_norm_K: Tensor | None = None
    index_norm_bias_K: Tensor | None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        **LatentWeights.NAMES,
        "index_q_XQ": "self_attn.indexer.wq_b.weight",
        "index_inputs_XD": "self_attn.indexer.inputs.weight",
        "index_norm_K": "self_attn.indexer.k_norm.weight",
        "index_norm_bias_K": "self_attn.indexer.k_norm.bias",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = (*LatentWeights.MULTIPLIED, "index_q_XQ", "index_inputs_XD")


class SelectingMixer(LatentMixer):
    """One rank's latent attention in one layer, with the indexer, if the layer has one."""

    _PARTS: ClassVar[Mapping[str, str]] = {
        **LatentMixer._PARTS,
        "_index_inputs": "indexer.inputs",
        "_index_queries": "indexer.wq_b",
    }

    def __init__(self, place: PartPlace, weights: SelectingWeights) -> None:
        super().__init__(place, weights)
        operations, mixer = place.operations, place.mixer
        assert isinstance(mixer, SelectingHeads)
        self._index_inputs: Linear | None = None
        self._index_queries: Linear | None = None
        self._key_norm: Norm | None = None
        self._key_norm_weights = weights.index_norm_K, weights.index_norm_bias_K
        self._key_size = mixer.indexer.head_dim
        if weights.index_q_XQ is None or weights.index_inputs_XD is None or weights.index_norm_K is None:
            return
        self._index_inputs = place.adapt(operations.linear(weights.index_inputs_XD), "index_inputs", None)
        self._index_queries = place.adapt(operations.linear(weights.index_q_XQ), "index_q", None)
        self._key_norm = operations.layer_norm(weights.index_norm_K, weights.index_norm_bias_K, _KEY_NORM_EPS)
        self._num_beside = weights.index_q_XQ.shape[1] + weights.index_inputs_XD.shape[0]
        # attention makes queries only where a token sees some of the tokens before it, and not all
        self.constants = self.constants._replace(index_queries=self._index_queries)

    def weights(self) -> SelectingWeights:
        own = vars(super().weights())
        if self._index_inputs is None or self._index_queries is None:
            return SelectingWeights(**own)
        norm_K, bias_K = self._key_norm_weights
        return SelectingWeights(
            **own,
            index_q_XQ=plain(self._index_queries),
            index_inputs_XD=plain(self._index_inputs),
            index_norm_K=norm_K,
            index_norm_bias_K=bias_K,
        )

    def _put_beside(self, x_TI: Tensor, made_of_TQ: Tensor, out_TX: Tensor) -> None:
        assert self._index_inputs is not None, "the layer has an indexer"
        assert self._key_norm is not None, "the layer has an indexer"
        own_TX, num_before = self._index_inputs(x_TI), made_of_TQ.shape[1]
        out_TX[:, :num_before] = made_of_TQ
        out_TX[:, num_before : num_before + self._key_size] = self._key_norm(own_TX[:, : self._key_size].contiguous())
        out_TX[:, num_before + self._key_size :] = own_TX[:, self._key_size :]
