"""The experts of one sparse layer that a rank holds. `router` chooses each token's experts.

Shape suffixes: N tokens, D hidden size, I size of what experts read, E experts, F size of an expert's hidden layer, K
experts of a token, P pairs of a token and one of its experts.
"""

from __future__ import annotations

# torch's tensors are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from raycore.models.spec import Gate
from raycore.parallel.tensor_parallel import sum_in_pairs
from raycore.parts.experts.layers.router import TorchRouter
from raycore.parts.experts.models import MoeSpec
from raycore.parts.experts.weights import ExpertWeights, MoeWeights

if TYPE_CHECKING:
    from raycore.layers.linear import Linear, LinearParts
    from raycore.layers.operations import GatedLinear, Operations

    _Expert = tuple[GatedLinear, Linear | LinearParts]


NoteChoices = Callable[[Tensor], None]


def ignore_choices(ids_NK: Tensor) -> None:
    """Do nothing: nobody asks which experts are chosen."""


class RoutedExperts(Protocol):
    """The experts of one sparse layer that a rank holds, with the layer's router."""

    router: TorchRouter
    note: NoteChoices
    """Gets the ids [N, K] of the experts that the router has chosen."""

    @property
    def in_parts(self) -> bool:
        """Whether results are of parts of experts, in float32, for `TensorParallel.sum_parts`."""
        ...

    def __call__(self, x_ND: Tensor, read_NI: Tensor) -> Tensor:
        """Return the weighted sum of each token's results from this rank's experts, [N, I].

        The router reads `x_ND`, and the experts `read_NI`.
        """
        ...

    def weights_of(self, expert: int) -> ExpertWeights:
        """Return the weights that one of this rank's experts was made of. They may be copies."""
        ...

    def set_experts(self, experts: range, received: Mapping[int, ExpertWeights]) -> None:
        """Compute these experts from now on. The rank holds those already that aren't in `received`."""
        ...


class TorchExperts:
    """`RoutedExperts` that computes one expert after the other, in their order."""

    def __init__(
        self, spec: MoeSpec, weights: MoeWeights, operations: Operations, gate: Gate = "silu", num_parts: int = 0
    ) -> None:
        """`num_parts`: into how many parts the inputs of `down` are divided. 0: results are in the inputs' dtype."""
        self.in_parts = num_parts > 0
        self._num_parts = num_parts
        self._spec = spec
        self._gate: Gate = gate
        self._operations = operations
        self.router = TorchRouter(spec, weights, operations)
        self.note: NoteChoices = ignore_choices
        self._first = weights.first_expert
        self._experts = [self._made(weights.expert(index)) for index in range(weights.gate_up_EFD.shape[0])]

    def __call__(self, x_ND: Tensor, read_NI: Tensor) -> Tensor:
        weights_NK, ids_NK = self.router(x_ND)
        self.note(ids_NK)
        counts: list[int] = torch.bincount(ids_NK.view(-1), minlength=self._spec.num_experts).tolist()
        own_counts = counts[self._first : self._first + len(self._experts)]
        start, num_pairs = sum(counts[: self._first]), sum(own_counts)
        if not num_pairs:
            return torch.zeros_like(read_NI, dtype=torch.float32 if self.in_parts else None)
        pairs_P = ids_NK.view(-1).argsort(stable=True)[start : start + num_pairs]
        tokens_P = pairs_P // self._spec.num_experts_per_tok
        read_PI, weights_P1 = read_NI.index_select(0, tokens_P), weights_NK.view(-1, 1).index_select(0, pairs_P)
        if self._spec.weighs_inputs:
            read_PI.mul_(weights_P1)
        by_expert = [
            self._results(expert, read_TI)
            for expert, read_TI in zip(self._experts, torch.split(read_PI, own_counts), strict=True)
            if len(read_TI)
        ]
        sums = [
            torch.zeros_like(read_NI).index_add_(0, tokens_P, self._weighed(torch.cat(part), weights_P1))
            for part in zip(*by_expert, strict=True)
        ]
        return sum_in_pairs([each.float() for each in sums]) if self.in_parts else sums[0]

    def _weighed(self, results_PI: Tensor, weights_P1: Tensor) -> Tensor:
        return results_PI if self._spec.weighs_inputs else results_PI.mul_(weights_P1)

    def _results(self, expert: _Expert, read_TI: Tensor) -> list[Tensor]:
        """The result of each part of an expert."""
        gate_up, down = expert
        found = down(gate_up(read_TI))
        return [found] if isinstance(found, Tensor) else found

    def weights_of(self, expert: int) -> ExpertWeights:
        gate_up, down = self._experts[expert - self._first]
        return ExpertWeights(gate_up.weight, down.weight, gate_up.bias, down.bias)

    def set_experts(self, experts: range, received: Mapping[int, ExpertWeights]) -> None:
        self._experts = [
            self._made(received[expert]) if expert in received else self._experts[expert - self._first]
            for expert in experts
        ]
        self._first = experts.start

    def _made(self, weights: ExpertWeights) -> _Expert:
        operations, gate_up_FD, bias_F = self._operations, weights.gate_up_FD, weights.gate_up_bias_F
        if self._spec.is_gated:
            gate_up = operations.gated_linear(gate_up_FD, bias_F, gate=self._gate)
        else:
            gate_up = operations.activated_linear(gate_up_FD, bias_F, self._gate)
        if not self.in_parts:
            return gate_up, self._operations.linear(weights.down_DF, weights.down_bias_D)
        assert isinstance(weights.down_DF, Tensor), "integers have no parts"
        return gate_up, self._operations.linear_parts(weights.down_DF, weights.down_bias_D, self._num_parts)
