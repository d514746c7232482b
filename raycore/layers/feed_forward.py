"""The feed-forward part of a layer: one network for all tokens (dense), or a few of many experts per token (sparse).

Shape suffixes: T tokens of the step, D hidden size, N the tokens that this rank's experts process.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from raycore.layers.linear import Linear
from raycore.layers.operations import GatedLinear, Operations
from raycore.models.moe import MoeSpec
from raycore.parallel.experts import ExpertRanks
from raycore.weights.moe_weights import MoeWeights


class FeedForward(Protocol):
    """The feed-forward part of one layer."""

    def apply(self, x_TD: Tensor) -> Tensor:
        """Return the result for `x_TD`, [T, D]."""
        ...

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return `residual_TD` plus the result for `x_TD`. May overwrite `residual_TD`."""
        ...

    def forward_nothing(self) -> None:
        """Take part in a step in which this engine has no token."""
        ...


class DenseFeedForward:
    """A gated feed-forward network: `down(activation(gate(x)) · up(x))`."""

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def apply(self, x_TD: Tensor) -> Tensor:
        return self.down(self.gate_up(x_TD))

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return self.down.add_to(residual_TD, self.gate_up(x_TD))

    def forward_nothing(self) -> None:
        """Do nothing: engines share no dense layers."""


class SparseFeedForward:
    """A sparse layer: the experts, or parts of experts, that this rank holds, and the ranks that share them."""

    def __init__(
        self, spec: MoeSpec, weights: MoeWeights, ranks: ExpertRanks, is_last: bool, operations: Operations
    ) -> None:
        """`is_last`: whether this is the model's last layer, which may process fewer rows than the others."""
        self._ranks = ranks
        self._is_last = is_last
        self._nothing_0D = weights.router_ED.new_empty(0, weights.router_ED.shape[1], device=operations.device)
        self.experts = operations.experts(spec, weights)

    def share_with(self, ranks: ExpertRanks) -> None:
        """Share the experts with these ranks from now on."""
        self._ranks = ranks

    def apply(self, x_TD: Tensor) -> Tensor:
        x_ND = self._ranks.gather(x_TD, self._is_last)
        return self._ranks.reduce(self.experts(x_ND), self._is_last)

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return residual_TD.add_(self.apply(x_TD))

    def forward_nothing(self) -> None:
        self.add_to(self._nothing_0D, self._nothing_0D)
