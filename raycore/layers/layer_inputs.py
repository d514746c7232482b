"""The inputs of their own that layers have: of each token, a vector for each layer.

Shape suffixes: T tokens of the step, D hidden size, L layers, P size of an input, O inputs of all layers, V this rank's
rows of the table of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from raycore.layers.part_place import PartPlace
from raycore.weights.layer_part_weights import LayerPartWeights

_LEAST_SQUARE = 1e-5


@dataclass
class LayerInputsWeights(LayerPartWeights):
    """The weights on one rank."""

    projection_OD: Tensor
    table_VO: Tensor
    norm_P: Tensor
    streams_in_XD: Tensor | None = None
    """Of `StreamsSpec`: makes all streams but one of embeddings."""
    streams_out_XD: Tensor | None = None
    """Makes what is added up of each of them after the last layer."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "projection_OD": "per_layer_model_projection.weight",
        "table_VO": "embed_tokens_per_layer.weight",
        "norm_P": "per_layer_projection_norm.weight",
        "streams_in_XD": "altup_projections.weight",
        "streams_out_XD": "altup_unembed_projections.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("projection_OD", "streams_in_XD", "streams_out_XD")


class LayerInputs:
    """`(√P · table(token) + norm(projection(embedding) / √D)) / √2` of each token. Ranks divide the table's rows."""

    def __init__(self, place: PartPlace, weights: LayerInputsWeights) -> None:
        spec, operations, self._ranks = place.spec, place.operations, place.ranks
        part = spec.layer_inputs
        assert part is not None, "the model has inputs of layers"
        self._norm_P = weights.norm_P
        self.table_VO = weights.table_VO.to(operations.device)
        """This rank's rows of the table of tokens."""
        self._start = self._ranks.rank * part.num_tokens // self._ranks.size
        self._num_tokens = part.num_tokens if part.num_tokens < spec.vocab_size else None
        self._shape = spec.num_layers, part.size
        # rounded, as in transformers' code
        self._scale = float(torch.tensor(math.sqrt(part.size), dtype=weights.table_VO.dtype))
        self._projection = operations.linear(weights.projection_OD)
        self._projection_scale = spec.hidden_size**-0.5
        self._norm = operations.rms_norm(weights.norm_P, spec.rms_norm_eps)

        self._streams_in = self._streams_out = None
        if weights.streams_in_XD is not None and weights.streams_out_XD is not None:
            self._streams_in = operations.linear(weights.streams_in_XD)
            self._streams_out = [operations.linear(each_DD) for each_DD in _squares(weights.streams_out_XD)]

    def __call__(self, token_ids_T: Tensor, h_TD: Tensor) -> Tensor:
        """Return [T, L, P] for tokens and their embeddings."""
        if self._num_tokens is not None:
            token_ids_T = token_ids_T.where(token_ids_T < self._num_tokens, 0)
        own_TO = self._looked_up(token_ids_T).mul_(self._scale)
        projected_TO = self._projection(h_TD).mul_(self._projection_scale)
        projected_TO = self._norm(projected_TO.view(-1, self._shape[1])).view(own_TO.shape)
        return own_TO.add_(projected_TO).mul_(2.0**-0.5).view(-1, *self._shape)

    def streams(self, h_TD: Tensor) -> Tensor:
        """Return all streams [T, S · D] for embeddings, each of the same magnitude."""
        assert self._streams_in is not None, "the model has streams"
        others_TSD = self._streams_in(h_TD).view(len(h_TD), -1, h_TD.shape[1])
        others_TSD = others_TSD * _magnitude(h_TD)[:, None] / _magnitude(others_TSD, _LEAST_SQUARE)
        return torch.cat([h_TD, others_TSD.flatten(1)], 1)

    def one_stream(self, h_TX: Tensor) -> Tensor:
        """Return the mean [T, D] of what is made of all streams, each of the magnitude of the first."""
        assert self._streams_out is not None, "the model has streams"
        first_TD, *others = (each.contiguous() for each in h_TX.chunk(1 + len(self._streams_out), 1))
        magnitude_T1, sum_TD = _magnitude(first_TD), first_TD.clone()
        for each_TD, linear in zip(others, self._streams_out, strict=True):
            made_TD = linear(each_TD)
            sum_TD += made_TD * magnitude_T1 / _magnitude(made_TD, _LEAST_SQUARE)
        return sum_TD.div_(1 + len(self._streams_out))

    def _looked_up(self, token_ids_T: Tensor) -> Tensor:
        if self._ranks.size == 1:
            return self.table_VO.index_select(0, token_ids_T)
        local_T = token_ids_T - self._start
        is_ours_T = (local_T >= 0) & (local_T < len(self.table_VO))
        own_TO = self.table_VO.index_select(0, local_T * is_ours_T)
        return self._ranks.all_reduce_(own_TO * is_ours_T.unsqueeze(1))

    def weights(self) -> LayerInputsWeights:
        """Return the weights that it was made of."""
        projection_OD = self._projection.weight
        assert isinstance(projection_OD, Tensor), "it is never quantized"
        found = LayerInputsWeights(projection_OD, self.table_VO, self._norm_P)
        if self._streams_in is not None and self._streams_out is not None:
            weights: list[Any] = [self._streams_in.weight, *(each.weight for each in self._streams_out)]
            found.streams_in_XD, found.streams_out_XD = weights[0], torch.cat(weights[1:])
        return found


def _magnitude(x: Tensor, least: float = 0.0) -> Tensor:
    """Return the root of the mean square over the last dimension, which stays. `least`: of the mean square."""
    return x.square().mean(-1, keepdim=True).clamp_(min=least).sqrt_()


def _squares(stacked_XD: Tensor) -> list[Tensor]:
    """Return the square matrices that are below each other."""
    return [*stacked_XD.view(-1, stacked_XD.shape[1], stacked_XD.shape[1])]
