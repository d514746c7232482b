"""The feed-forward part of a layer: one network for all tokens (dense), or a few of many experts per token (sparse).

Shape suffixes: T tokens of the step, D hidden size, E experts, N the tokens that this rank's experts process, K experts
of a token, P pairs of a token and one of its experts.
"""

from __future__ import annotations

# torch's tensors are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from raycore.checkpoint.moe_spec import MoeSpec
from raycore.model.experts import ExpertRanks
from raycore.model.layers import Linear, make_linear, silu_and_mul
from raycore.model.rows import Rows
from raycore.model.weights.moe_weights import MoeWeights


class FeedForward(Protocol):
    """The feed-forward part of one layer."""

    is_row_wise: bool
    """Whether a row's result depends on that row alone, so that rows can be processed in tiles."""

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return `residual_TD` plus the result for `x_TD`. May overwrite `residual_TD`."""
        ...

    def forward_nothing(self) -> None:
        """Take part in a step in which this engine has no token."""
        ...

    def row_functions(self) -> list[Callable[[Tensor], Tensor]]:
        """Return the functions that this object applies to tiles of rows [T, D]. `Decoder.check_tiles` tests them."""
        ...


class DenseFeedForward:
    """A gated feed-forward network: `down(silu(gate(x)) · up(x))`."""

    is_row_wise = True

    def __init__(self, gate_up: Linear, down: Linear, rows: Rows) -> None:
        self._gate_up = gate_up
        self._down = down
        self._rows = rows

    def apply(self, x_TD: Tensor) -> Tensor:
        """Return the network's output for `x_TD`, [T, D]."""
        return self._down(self._rows.elementwise(silu_and_mul, self._gate_up(x_TD)))

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return self._down.add_to(residual_TD, self._rows.elementwise(silu_and_mul, self._gate_up(x_TD)))

    def forward_nothing(self) -> None:
        """Do nothing: engines share no dense layers."""

    def row_functions(self) -> list[Callable[[Tensor], Tensor]]:
        return [lambda x_TD: self.add_to(torch.zeros_like(x_TD), x_TD)]


class SparseFeedForward:
    """A sparse layer's router, and the experts, or parts of experts, that this rank holds."""

    is_row_wise = False
    """False, because rows are grouped by expert, and ranks exchange all rows at once."""

    def __init__(
        self, spec: MoeSpec, weights: MoeWeights, ranks: ExpertRanks, is_last: bool, device: torch.device, rows: Rows
    ) -> None:
        """`is_last`: whether this is the model's last layer, which may process fewer rows than the others."""
        self._spec = spec
        self._ranks = ranks
        self._is_last = is_last
        self._rows = rows
        self._nothing_0D = torch.empty(0, weights.router_ED.shape[1], dtype=weights.router_ED.dtype, device=device)
        self._router = make_linear(weights.router_ED.to(device))
        self._first = weights.first_expert
        gate_up_EFD, down_EDF = weights.gate_up_EFD.to(device), weights.down_EDF.to(device)
        self._experts = [
            DenseFeedForward(make_linear(gate_up_FD), make_linear(down_DF), rows).apply
            for gate_up_FD, down_DF in zip(gate_up_EFD, down_EDF, strict=True)
        ]

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        x_ND = self._ranks.gather(x_TD, self._is_last)
        out_TD = self._ranks.reduce(self._apply_experts(x_ND), self._is_last)
        return residual_TD.add_(out_TD)

    def forward_nothing(self) -> None:
        self.add_to(self._nothing_0D, self._nothing_0D)

    def row_functions(self) -> list[Callable[[Tensor], Tensor]]:
        return [self._likelihood, *self._experts]

    def _likelihood(self, x_ND: Tensor) -> Tensor:
        """Return float32[N, E]: the router's probability of each expert for each token."""
        return functional.softmax(self._router(x_ND), dim=-1, dtype=torch.float32)

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
            self._rows.apply(expert, x_D)
            for expert, x_D in zip(self._experts, torch.split(x_PD, own_counts), strict=True)
            if len(x_D)
        ]
        y_PD = torch.cat(parts).mul_(weights_NK.view(-1, 1).index_select(0, pairs_P))
        return out_ND.index_add_(0, tokens_P, y_PD)

    def _route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of each token's experts, both [N, K].

        Weights are computed in float32 and converted to the dtype of `x_ND`.
        """
        likely_NE = self._rows.apply(self._likelihood, x_ND)
        weights_NK, ids_NK = likely_NE.topk(self._spec.num_experts_per_tok, dim=-1)
        if self._spec.norm_topk_prob:
            weights_NK /= weights_NK.sum(dim=-1, keepdim=True)
        return weights_NK.to(x_ND.dtype), ids_NK
