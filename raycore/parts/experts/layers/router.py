"""Chooses each token's experts in a sparse layer, in plain torch.

Shape suffixes: N tokens, D hidden size, E experts, K experts of a token, G groups of experts, C best experts of a
group.
"""

from __future__ import annotations

# torch's tensors are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from raycore.parts.experts.models import MoeSpec
from raycore.parts.experts.weights import MoeWeights

if TYPE_CHECKING:
    from raycore.layers.operations import Operations


class TorchRouter:
    """The router of one sparse layer, whole on every rank."""

    def __init__(self, spec: MoeSpec, weights: MoeWeights, operations: Operations) -> None:
        self._spec = spec
        self._sigmoid = operations.sigmoid
        self._dtype = weights.router_ED.dtype
        self.linear = operations.linear(weights.router_ED, weights.router_bias_E)
        correction_E = weights.correction_E
        scales_E = weights.scales_E
        self.scales_E = None if scales_E is None else scales_E.to(operations.device)
        self.correction_E = None if correction_E is None else correction_E.to(operations.device)

    def __call__(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights and ids of each token's experts, both [N, K].

        Weights are computed in float32 and converted to the dtype of `x_ND`.
        """
        router, per_token = self._spec.router, self._spec.num_experts_per_tok
        scores_NE = self._scores(self.logits(x_ND))
        choice_NE = scores_NE if self.correction_E is None else scores_NE + self.correction_E
        if router.num_groups > 1:
            choice_NE = self._in_best_groups(choice_NE)
        weights_NK, ids_NK = choice_NE.topk(per_token, dim=-1)
        if choice_NE is not scores_NE:
            weights_NK = scores_NE.gather(1, ids_NK)
        if router.scores == "softmax_of_chosen":
            weights_NK = functional.softmax(weights_NK, dim=-1)
        if router.is_normalized:
            sums_N1 = weights_NK.sum(dim=-1, keepdim=True)
            weights_NK /= sums_N1 + router.least_sum if router.scores == "sigmoid" else sums_N1
        if router.scaling != 1.0:
            weights_NK *= router.scaling
        return self.scaled(weights_NK, ids_NK).to(x_ND.dtype), ids_NK

    def scaled(self, weights_NK: Tensor, ids_NK: Tensor) -> Tensor:
        """Return weights, each multiplied by the number of its expert, if experts have one."""
        return weights_NK if self.scales_E is None else weights_NK * self.scales_E[ids_NK]

    def logits(self, x_ND: Tensor) -> Tensor:
        """Return the logits [N, E]."""
        return self.linear(x_ND.to(self._dtype))

    def _scores(self, logits_NE: Tensor) -> Tensor:
        if self._spec.router.scores == "softmax":
            return functional.softmax(logits_NE, dim=-1, dtype=torch.float32)
        return self._sigmoid(logits_NE.float()) if self._spec.router.scores == "sigmoid" else logits_NE.float()

    def _in_best_groups(self, choice_NE: Tensor) -> Tensor:
        """Return `choice_NE` with -inf for the experts of all other groups."""
        router = self._spec.router
        size = self._spec.num_experts // router.num_groups
        by_group_NGE = choice_NE.view(len(choice_NE), router.num_groups, size)
        best_NGC = by_group_NGE.topk(min(router.num_compared, size), dim=-1).values
        ids_NK = best_NGC.sum(dim=-1).topk(router.num_chosen_groups, dim=-1).indices
        is_out_NG = torch.ones_like(best_NGC[..., 0], dtype=torch.bool).scatter_(1, ids_NK, False)
        return by_group_NGE.masked_fill(is_out_NG.unsqueeze(-1), -torch.inf).view_as(choice_NE)
