"""A feed-forward part with experts: each token goes to a few of many small networks (sparse).

Shape suffixes: T tokens of the step, D hidden size, N the tokens that this rank's experts process, I size of what they
read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from raycore.layers.feed_forward import DenseFeedForward, FeedForward
from raycore.layers.linear import Linear
from raycore.layers.part_place import PartPlace, unadapted
from raycore.parts.experts.models import experts_of
from raycore.parts.experts.parallel import ExpertRanks, SplitExperts
from raycore.parts.experts.weights import ExpertWeights, MoeWeights
from raycore.weights.layer_part_weights import MlpWeights


class SparseFeedForward(FeedForward):
    """A sparse layer: the experts, or parts of experts, that this rank holds, and the ranks that share them.

    Shared experts are split over the ranks of one engine, and process its tokens only.
    """

    def __init__(self, place: PartPlace, weights: MoeWeights) -> None:
        spec, operations, ranks = place.spec, place.operations, place.experts
        self._spec = experts_of(spec)
        self._ranks = ranks
        self._is_last = place.index == spec.num_layers - 1
        # ranks without a token need its dtype only if they share experts, and then these are converted
        dtype = weights.gate_up_EFD.dtype if isinstance(weights.gate_up_EFD, Tensor) else torch.float32
        self._nothing_0D = torch.empty(0, weights.router_ED.shape[1], dtype=dtype, device=operations.device)
        split = ranks.ranks if isinstance(ranks, SplitExperts) else None
        self.experts = operations.experts(self._spec, weights, spec.gates(place.index).experts, split)
        self._width = self._spec.width(spec)
        self._into = None if weights.into_ID is None else operations.linear(weights.into_ID)
        self._out = None if weights.out_DI is None else operations.linear(weights.out_DI)
        self._sigmoid, self._shared, self._gate = operations.sigmoid, None, None
        if weights.shared_gate_up_FD is not None and weights.shared_down_DF is not None:
            shared = MlpWeights(weights.shared_gate_up_FD, weights.shared_down_DF)
            self._shared = DenseFeedForward(replace(place, adapt=unadapted), shared)
        if weights.shared_gate_1D is not None:
            self._gate = operations.linear(weights.shared_gate_1D)

    def share_with(self, ranks: ExpertRanks) -> None:
        """Share the experts with these ranks from now on."""
        self._ranks = ranks

    def note_choices(self, note: Callable[[Tensor], None]) -> None:
        """Have `note` called with what the router chooses: the ids [T, K] of the experts of this engine's rows."""
        self.experts.note = lambda ids_NK: note(self._ranks.own(ids_NK, self._is_last))

    def num_weights_of(self, num_experts: int) -> int:
        """Return the number of multiplications for one token in `num_experts` experts, as its router uses them."""
        num_used = num_experts * self._spec.num_experts_per_tok / self._spec.num_experts
        num_projections = 1 + len(self._spec.gate_and_up)
        return int(num_used * num_projections * self._width * self._spec.intermediate_size)

    def empty_expert(self) -> ExpertWeights:
        """Allocate the weights of an expert."""
        size, width, empty = self._spec.intermediate_size, self._width, self._nothing_0D.new_empty
        num_rows = len(self._spec.gate_and_up) * size
        biases = (empty(num_rows), empty(width)) if self._spec.has_bias else (None, None)
        return ExpertWeights(empty(num_rows, width), empty(width, size), *biases)

    def apply(self, x_TD: Tensor) -> Tensor:
        out_TI = self._of_experts(x_TD)
        out_TD = self._with_shared(out_TI if self._out is None else self._out(out_TI), x_TD)
        return out_TD if self._spec.multiplier == 1.0 else out_TD.mul_(self._spec.multiplier)

    def _of_experts(self, x_TD: Tensor) -> Tensor:
        """Return the sum of the results of a token's experts, of all ranks."""
        x_ND = self._ranks.gather(x_TD, self._is_last)
        out_NI = self.experts(*self._inputs(x_ND))
        if self.experts.in_parts and isinstance(self._ranks, SplitExperts):
            return self._ranks.ranks.sum_parts([out_NI]).to(x_TD.dtype)
        return self._ranks.reduce(out_NI.to(x_TD.dtype), self._is_last)

    def _inputs(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the router and what experts read."""
        return x_ND, x_ND if self._into is None else self._into(x_ND)

    def _with_shared(self, out_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Add the result of shared experts to that of the others."""
        if self._shared is None or not len(x_TD):
            return out_TD
        # after the sum over all ranks: before it, the sum's order would depend on which engine this is
        if self._gate is None:
            return self._shared.add_to(out_TD, x_TD)
        return out_TD.add_(self._shared.apply(x_TD) * self._sigmoid(self._gate(x_TD)))

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return residual_TD.add_(self.apply(x_TD))

    def weights(self) -> MoeWeights:
        router, nothing = self.experts.router, self._nothing_0D.new_empty(0, 0, 0)
        found = MoeWeights(_plain(router.linear), 0, nothing, nothing, router.correction_E)
        found.router_bias_E, found.scales_E = router.linear.bias, router.scales_E
        if self._into is not None and self._out is not None:
            found.into_ID, found.out_DI = self._into.weight, self._out.weight
        if self._shared is not None:
            found.shared_gate_up_FD, found.shared_down_DF = self._shared.gate_up.weight, self._shared.down.weight
        if self._gate is not None:
            found.shared_gate_1D = _plain(self._gate)
        return found

    def forward_nothing(self) -> None:
        """Take part in a step in which this engine has no token."""
        self.add_to(self._nothing_0D, self._nothing_0D)


def _plain(linear: Linear) -> Tensor:
    assert isinstance(linear.weight, Tensor), "routers and gates aren't quantized"
    return linear.weight
