"""The feed-forward part of a layer: one network for all tokens (dense), or a few of many experts per token (sparse).

Shape suffixes: T tokens of the step, D hidden size, E experts, N the tokens that this rank's experts process, K experts
of a token, P pairs of a token and one of its experts.
"""

from __future__ import annotations

# torch's tensors are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from raycore.checkpoint.moe_spec import MoeSpec
from raycore.model.experts import ExpertRanks
from raycore.model.layers import Linear
from raycore.model.operations import GatedLinear, Operations
from raycore.model.weights.moe_weights import MoeWeights


class FeedForward(Protocol):
    """The feed-forward part of one layer."""

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return `residual_TD` plus the result for `x_TD`. May overwrite `residual_TD`."""
        ...

    def forward_nothing(self) -> None:
        """Take part in a step in which this engine has no token."""
        ...


class DenseFeedForward:
    """A gated feed-forward network: `down(silu(gate(x)) · up(x))`."""

    def __init__(self, gate_up: GatedLinear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def apply(self, x_TD: Tensor) -> Tensor:
        """Return the network's output for `x_TD`, [T, D]."""
        return self._down(self._gate_up(x_TD))

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return self._down.add_to(residual_TD, self._gate_up(x_TD))

    def forward_nothing(self) -> None:
        """Do nothing: engines share no dense layers."""


class SparseFeedForward:
    """A sparse layer's router, and the experts, or parts of experts, that this rank holds."""

    def __init__(
        self, spec: MoeSpec, weights: MoeWeights, ranks: ExpertRanks, is_last: bool, operations: Operations
    ) -> None:
        """`is_last`: whether this is the model's last layer, which may process fewer rows than the others."""
        self._spec = spec
        self._ranks = ranks
        self._is_last = is_last
        self._nothing_0D = weights.router_ED.new_empty(0, weights.router_ED.shape[1], device=operations.device)
        self._router = operations.linear(weights.router_ED)
        self._first = weights.first_expert
        self._experts = [
            DenseFeedForward(operations.gated_linear(gate_up_FD), operations.linear(down_DF))
            for gate_up_FD, down_DF in zip(weights.gate_up_EFD, weights.down_EDF, strict=True)
        ]

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        x_ND = self._ranks.gather(x_TD, self._is_last)
        out_TD = self._ranks.reduce(self._apply_experts(x_ND), self._is_last)
        return residual_TD.add_(out_TD)

    def forward_nothing(self) -> None:
        self.add_to(self._nothing_0D, self._nothing_0D)

    def _apply_experts(self, x_ND: Tensor) -> Tensor:
        """Return [N, D]: for each token, the weighted sum of its results from this rank's experts, in their order."""
        weights_NK, ids_NK = self._route(x_ND)
        counts: list[int] = torch.bincount(ids_NK.view(-1), minlength=self._spec.num_experts).tolist()
        own_counts = counts[self._first : self._first + len(self._experts)]
        start, num_pairs = sum(counts[: self._first]), sum(own_counts)
        out_ND = torch.zeros_like(x_ND)
        if not num_pairs:
            return out_ND
        pairs_P = ids_NK.view(-1).argsort(stable=True)[start : start + num_pairs]
        tokens_P = pairs_P // self._spec.num_experts_per_tok
        x_PD = x_ND.index_select(0, tokens_P)
        parts = [
            expert.apply(x_D)
            for expert, x_D in zip(self._experts, torch.split(x_PD, own_counts), strict=True)
            if len(x_D)
        ]
        y_PD = torch.cat(parts).mul_(weights_NK.view(-1, 1).index_select(0, pairs_P))
        return out_ND.index_add_(0, tokens_P, y_PD)

    def _route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of each token's experts, both [N, K].

        Weights are computed in float32 and converted to the dtype of `x_ND`.
        """
        likely_NE = functional.softmax(self._router(x_ND), dim=-1, dtype=torch.float32)
        weights_NK, ids_NK = likely_NE.topk(self._spec.num_experts_per_tok, dim=-1)
        if self._spec.norm_topk_prob:
            weights_NK /= weights_NK.sum(dim=-1, keepdim=True)
        return weights_NK.to(x_ND.dtype), ids_NK
