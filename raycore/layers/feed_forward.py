"""The feed-forward part of a layer: the contract of what computes it, and one network for all tokens (dense).

Those with experts are in `raycore.parts.experts.layers`. Shape suffixes: T tokens of the step, D hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from raycore.layers.linear import AroundLinear, Linear
from raycore.layers.operations import Activation
from raycore.layers.part_place import PartPlace, unadapted
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.weights.layer_part_weights import LayerPartWeights, MlpWeights


class FeedForward(ABC):
    """The feed-forward part of one layer on one rank.

    `FeedForwardSpec.computed_by` names the class, which gets a `PartPlace` and the weights.
    """

    @abstractmethod
    def apply(self, x_TD: Tensor) -> Tensor:
        """Return the result for `x_TD`, [T, D]."""

    @abstractmethod
    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        """Return `residual_TD` plus the result for `x_TD`. May overwrite `residual_TD`."""

    @abstractmethod
    def weights(self) -> LayerPartWeights:
        """Return the weights that the part was made of, without those of experts. Most are copies."""


class DenseFeedForward(FeedForward):
    """A feed-forward network: `down(activation(gate(x)) · up(x))`, or `down(activation(up(x)))`."""

    def __init__(self, place: PartPlace, weights: MlpWeights, activation: Activation | None = None) -> None:
        """`activation`: of a network without a gate. None: the one that the model's `gate` names."""
        spec, operations, ranks, adapt = place.spec, place.operations, place.ranks, place.adapt
        gate = spec.gates(place.index).dense
        # kernels compute the gate, too, if nothing is between
        around: Callable[[Linear], Linear] | None = (
            None if adapt is unadapted else lambda linear: adapt(linear, "gate_up", None)
        )
        if spec.is_gated:
            self.gate_up = operations.gated_linear(weights.gate_up_FD, weights.gate_up_bias, around, gate)
        else:
            self.gate_up = operations.activated_linear(
                weights.gate_up_FD, weights.gate_up_bias, activation or gate, around
            )
        self.down = adapt(operations.linear(weights.down_DF, weights.down_bias, ranks), "down", ranks)

    def apply(self, x_TD: Tensor) -> Tensor:
        return self.down(self.gate_up(x_TD))

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return self.down.add_to(residual_TD, self.gate_up(x_TD))

    def weights(self) -> MlpWeights:
        return MlpWeights(self.gate_up.weight, self.down.weight, self.gate_up.bias, self.down.bias)


class ScaledFeedForward(DenseFeedForward):
    """A feed-forward network with multipliers: `down(activation(m · gate(x)) · up(x)) · n`, as in `mlp_multipliers`."""

    def __init__(self, place: PartPlace, weights: MlpWeights) -> None:
        of_gate, self._multiplier = place.spec.mlp_multipliers

        def adapt(linear: Linear, name: str, ranks: TensorParallel | None) -> Linear:
            adapted = place.adapt(linear, name, ranks)
            return _ScaledGate(adapted, of_gate) if name == "gate_up" else adapted

        super().__init__(replace(place, adapt=adapt), weights)

    def apply(self, x_TD: Tensor) -> Tensor:
        return super().apply(x_TD).mul_(self._multiplier)

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return residual_TD.add_(self.apply(x_TD))


class _ScaledGate(AroundLinear):
    """The linear layer of gate and up, of which the gate is multiplied. Implements `Linear`."""

    def __init__(self, linear: Linear, multiplier: float) -> None:
        super().__init__(linear)
        self._multiplier = multiplier

    def __call__(self, x_TI: Tensor) -> Tensor:
        gate_up_TF = self._linear(x_TI)
        gate_up_TF[:, : gate_up_TF.shape[1] // 2].mul_(self._multiplier)
        return gate_up_TF

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return residual_TO.add_(self(x_TI))
