"""The feed-forward part of a layer: one network for all tokens (dense), or a few of many experts per token (sparse).

Shape suffixes: T tokens of the step, D hidden size, N the tokens that this rank's experts process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from raycore.layers.linear import Linear
from raycore.layers.operations import GatedLinear, Operations
from raycore.models.spec import Gate
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.models import MoeSpec
from raycore.parts.experts.parallel import ExpertRanks, SplitExperts
from raycore.parts.experts.weights import ExpertWeights, MoeWeights, SharedExpertWeights


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


class SharedFeedForward:
    """The shared experts of a sparse layer: a dense network, whose result may be multiplied by that of a gate."""

    def __init__(
        self, weights: SharedExpertWeights, ranks: TensorParallel | None, operations: Operations, gate: Gate
    ) -> None:
        """`ranks`: those that split the network. None: this one has all of it."""
        down = operations.linear(weights.down_DF, None, ranks)
        self._network = DenseFeedForward(operations.gated_linear(weights.gate_up_FD, gate=gate), down)
        self._gate = None if weights.gate_1D is None else operations.linear(weights.gate_1D)
        self._sigmoid = operations.sigmoid

    def add_to(self, out_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return `out_TD` plus the result for `x_TD`. May overwrite `out_TD`."""
        if self._gate is None:
            return self._network.add_to(out_TD, x_TD)
        return out_TD.add_(self._network.apply(x_TD) * self._sigmoid(self._gate(x_TD)))

    def weights(self) -> SharedExpertWeights:
        """Return the weights that it was made of. They may be copies."""
        gate_up_FD, down_DF = self._network.gate_up.weight, self._network.down.weight
        gate_1D = None if self._gate is None else self._gate.weight
        assert isinstance(gate_up_FD, Tensor), "models with experts aren't quantized"
        assert isinstance(down_DF, Tensor), "models with experts aren't quantized"
        assert gate_1D is None or isinstance(gate_1D, Tensor), "models with experts aren't quantized"
        return SharedExpertWeights(gate_up_FD, down_DF, gate_1D)


class SparseFeedForward:
    """A sparse layer: the experts, or parts of experts, that this rank holds, and the ranks that share them.

    Shared experts are split over the ranks of one engine, and process its tokens only.
    """

    def __init__(
        self,
        spec: MoeSpec,
        weights: MoeWeights,
        ranks: ExpertRanks,
        is_last: bool,
        operations: Operations,
        engine_ranks: TensorParallel | None = None,
        gate: Gate = "silu",
    ) -> None:
        """
        Args:
            ranks: those that share the experts.
            is_last: whether this is the model's last layer, which may process fewer rows than the others.
            engine_ranks: the tensor-parallel ranks of this engine. None: there is one.
            gate: that of all experts.
        """
        self._spec = spec
        self._ranks = ranks
        self._is_last = is_last
        hidden_size = weights.router_ED.shape[1]
        # ranks without a token need its dtype only if they share experts, and then these are converted
        dtype = weights.gate_up_EFD.dtype if isinstance(weights.gate_up_EFD, Tensor) else torch.float32
        self._nothing_0D = torch.empty(0, hidden_size, dtype=dtype, device=operations.device)
        self.experts = operations.experts(spec, weights, gate, ranks.ranks if isinstance(ranks, SplitExperts) else None)
        shared = weights.shared
        self._shared = None if shared is None else SharedFeedForward(shared, engine_ranks, operations, gate)

    def share_with(self, ranks: ExpertRanks) -> None:
        """Share the experts with these ranks from now on."""
        self._ranks = ranks

    def note_choices(self, note: Callable[[Tensor], None]) -> None:
        """Have `note` called with what the router chooses: the ids [T, K] of the experts of this engine's rows."""
        self.experts.note = lambda ids_NK: note(self._ranks.own(ids_NK, self._is_last))

    def num_weights_of(self, num_experts: int) -> int:
        """Return the number of multiplications for one token in `num_experts` experts, as its router uses them."""
        num_used = num_experts * self._spec.num_experts_per_tok / self._spec.num_experts
        return int(num_used * 3 * self._nothing_0D.shape[1] * self._spec.intermediate_size)

    def empty_expert(self) -> ExpertWeights:
        """Allocate the weights of an expert."""
        size, hidden, empty = self._spec.intermediate_size, self._nothing_0D.shape[1], self._nothing_0D.new_empty
        biases = (empty(2 * size), empty(hidden)) if self._spec.has_bias else (None, None)
        return ExpertWeights(empty(2 * size, hidden), empty(hidden, size), *biases)

    def apply(self, x_TD: Tensor) -> Tensor:
        x_ND = self._ranks.gather(x_TD, self._is_last)
        out_ND = self.experts(x_ND)
        if self.experts.in_parts and isinstance(self._ranks, SplitExperts):
            out_TD = self._ranks.ranks.sum_parts([out_ND]).to(x_TD.dtype)
        else:
            out_TD = self._ranks.reduce(out_ND.to(x_TD.dtype), self._is_last)
        # after the sum over all ranks: before it, the sum's order would depend on which engine this is
        return out_TD if self._shared is None or not len(x_TD) else self._shared.add_to(out_TD, x_TD)

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return residual_TD.add_(self.apply(x_TD))

    def dense_weights(self) -> MoeWeights:
        """Return the weights that it was made of, without those of experts. They may be copies."""
        router = self.experts.router
        assert isinstance(router.linear.weight, Tensor), "routers aren't computed in fp8"
        router_ED, shared = router.linear.weight, None if self._shared is None else self._shared.weights()
        nothing = self._nothing_0D.new_empty(0, 0, 0)
        return MoeWeights(router_ED, 0, nothing, nothing, router.correction_E, shared, router.linear.bias)

    def forward_nothing(self) -> None:
        self.add_to(self._nothing_0D, self._nothing_0D)
