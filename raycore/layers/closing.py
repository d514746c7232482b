"""The dense feed-forward part that ends a layer: see `raycore.models.closing`.

Shape suffixes: T tokens of the step, D hidden size, P size of the layer's own input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from raycore.layers.feed_forward import DenseFeedForward
from raycore.layers.linear import Linear
from raycore.layers.part_place import PartPlace, unadapted
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.weight import Weight


@dataclass(kw_only=True)
class EndWeights:
    """The weights of the end of a layer, which every rank has whole."""

    after_D: Tensor
    """Of the norm of the feed-forward part's result."""
    scalar_1: Tensor
    input_gate_PD: Weight | None = None
    input_out_DP: Weight | None = None
    input_norm_D: Tensor | None = None

    NAMES: ClassVar[Mapping[str, str]] = {
        "after_D": "post_feedforward_layernorm.weight",
        "scalar_1": "layer_scalar",
        "input_gate_PD": "per_layer_input_gate.weight",
        "input_out_DP": "per_layer_projection.weight",
        "input_norm_D": "post_per_layer_input_norm.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = ("input_gate_PD", "input_out_DP")


@dataclass(kw_only=True)
class ClosingWeights(EndWeights, MlpWeights):
    """The weights of such a part on one rank."""

    NAMES: ClassVar[Mapping[str, str]] = {**MlpWeights.NAMES, **EndWeights.NAMES}
    MULTIPLIED: ClassVar[tuple[str, ...]] = (*MlpWeights.MULTIPLIED, *EndWeights.MULTIPLIED)


class LayerEnd:
    """What ends a layer after its feed-forward part."""

    def __init__(self, place: PartPlace, weights: EndWeights) -> None:
        spec, operations, adapt = place.spec, place.operations, place.adapt
        self._layer, self._handed = place.index, place.handed
        self._after_D, self._input_norm_D = weights.after_D, weights.input_norm_D
        self._after = operations.rms_norm(weights.after_D, spec.rms_norm_eps)
        self._scalar_1 = weights.scalar_1.to(operations.device)
        self._gate = None
        if weights.input_gate_PD is not None and weights.input_out_DP is not None and weights.input_norm_D is not None:
            around: Callable[[Linear], Linear] | None = (
                None if adapt is unadapted else lambda linear: adapt(linear, "layer_input_gate", None)
            )
            activation = spec.gates(place.index).dense
            self._gate = operations.activated_linear(weights.input_gate_PD, None, activation, around)
            self._out = adapt(operations.linear(weights.input_out_DP), "layer_input", None)
            self._norm = operations.rms_norm(weights.input_norm_D, spec.rms_norm_eps)

    def __call__(self, h_TD: Tensor, out_TD: Tensor) -> Tensor:
        """Return the layer's output for hidden states and the result of the feed-forward part. Overwrites `h_TD`."""
        h_TD.add_(self._after(out_TD))
        if self._gate is not None:
            gated_TP = self._gate(h_TD).mul_(self._handed.inputs(self._layer))
            h_TD.add_(self._norm(self._out(gated_TP)))
        return h_TD.mul_(self._scalar_1)

    def weights(self) -> dict[str, Any]:
        """Return the weights that it was made of, by their fields."""
        found: dict[str, Any] = {"after_D": self._after_D, "scalar_1": self._scalar_1}
        if self._gate is not None:
            found |= {"input_gate_PD": self._gate.weight, "input_out_DP": self._out.weight}
            found |= {"input_norm_D": self._input_norm_D}
        return found


class ClosingFeedForward(DenseFeedForward):
    """A dense network, and the end of its layer."""

    def __init__(self, place: PartPlace, weights: ClosingWeights) -> None:
        super().__init__(place, weights)
        self._end = LayerEnd(place, weights)

    def add_to(self, residual_TD: Tensor, x_TD: Tensor) -> Tensor:
        return self._end(residual_TD, self.apply(x_TD))

    def weights(self) -> ClosingWeights:
        return ClosingWeights(**vars(super().weights()), **self._end.weights())
