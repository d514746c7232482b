"""Experts beside a dense network in a part that ends a layer: see `ClosingMoeSpec`.

Shape suffixes: T tokens of the step, D hidden size, N the tokens that this rank's experts process, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from raycore.layers.closing import EndWeights, LayerEnd
from raycore.layers.part_place import PartPlace
from raycore.parts.experts.layers.sparse_feed_forward import SparseFeedForward
from raycore.parts.experts.weights import MoeWeights

_OF_ROUTER_AND_NORMS = "dense_after_D", "experts_before_D", "experts_after_D", "router_scale_D"


@dataclass(kw_only=True)
class ClosingMoeWeights(EndWeights, MoeWeights):
    """The weights of such a part on one rank."""

    dense_after_D: Tensor
    experts_before_D: Tensor
    experts_after_D: Tensor
    router_scale_D: Tensor
    """Multiplies what the router reads."""

    NAMES: ClassVar[Mapping[str, str]] = {
        **MoeWeights.NAMES,
        "dense_after_D": "post_feedforward_layernorm_1.weight",
        "experts_before_D": "pre_feedforward_layernorm_2.weight",
        "experts_after_D": "post_feedforward_layernorm_2.weight",
        "router_scale_D": "router.scale",
        **EndWeights.NAMES,
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = (*MoeWeights.MULTIPLIED, *EndWeights.MULTIPLIED)


class ClosingSparse(SparseFeedForward):
    """Experts, a dense network, and the end of their layer."""

    def __init__(self, place: PartPlace, weights: ClosingMoeWeights) -> None:
        super().__init__(place, weights)
        operations, eps, hidden = place.operations, place.spec.rms_norm_eps, place.spec.hidden_size
        self._own = {name: getattr(weights, name) for name in _OF_ROUTER_AND_NORMS}
        self._end = LayerEnd(place, weights)
        self._dense_after = operations.rms_norm(weights.dense_after_D, eps)
        self._experts_before = operations.rms_norm(weights.experts_before_D, eps)
        self._experts_after = operations.rms_norm(weights.experts_after_D, eps)
        self._router_norm = operations.rms_norm(torch.ones(hidden, dtype=weights.router_scale_D.dtype), eps)
        self._router_scale_D = weights.router_scale_D.to(operations.device)
        self._root = hidden**-0.5

    def _inputs(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        routed_ND = self._router_norm(x_ND).mul_(self._router_scale_D).mul_(self._root)
        return routed_ND, self._experts_before(x_ND)

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        out_TD = self._of_experts(residual_TD)
        if not len(x_TD):
            return residual_TD
        assert self._shared is not None, "there is a dense network"
        dense_TD = self._dense_after(self._shared.apply(x_TD))
        return self._end(residual_TD, dense_TD.add_(self._experts_after(out_TD)))

    def weights(self) -> ClosingMoeWeights:
        return ClosingMoeWeights(**vars(super().weights()), **self._own, **self._end.weights())
