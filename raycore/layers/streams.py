"""The feed-forward part of layers with several streams of hidden states: see `raycore.models.streams`.

Shape suffixes: T tokens of the step, D hidden size, F this rank's rows of the gate, S streams, R rank of LAuReL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from raycore.layers.feed_forward import DenseFeedForward
from raycore.layers.linear import AroundLinear, Linear
from raycore.layers.part_place import PartPlace, unadapted
from raycore.models.streams import StreamsSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.weights.layer_part_weights import MlpWeights
from raycore.weights.weight import Weight

_KEPT = ("input_norm_D", "laurel_norm_D", "router_norm_D", "active_scale_D")


@dataclass(kw_only=True)
class StreamsWeights(MlpWeights):
    """The weights of such a part on one rank."""

    input_gate_PD: Weight
    input_out_DP: Weight
    left_RD: Weight
    right_DR: Weight
    input_norm_D: Tensor
    laurel_norm_D: Tensor
    router_norm_D: Tensor
    active_scale_D: Tensor
    router_SD: Tensor
    prediction_XS: Tensor
    correction_SS: Tensor

    NAMES: ClassVar[Mapping[str, str]] = {
        **MlpWeights.NAMES,
        "input_gate_PD": "per_layer_input_gate.weight",
        "input_out_DP": "per_layer_projection.weight",
        "left_RD": "laurel.linear_left.weight",
        "right_DR": "laurel.linear_right.weight",
        "input_norm_D": "post_per_layer_input_norm.weight",
        "laurel_norm_D": "laurel.post_laurel_norm.weight",
        "router_norm_D": "altup.router_norm.weight",
        "active_scale_D": "altup.correct_output_scale",
        "router_SD": "altup.modality_router.weight",
        "prediction_XS": "altup.prediction_coefs.weight",
        "correction_SS": "altup.correction_coefs.weight",
    }
    MULTIPLIED: ClassVar[tuple[str, ...]] = (
        *MlpWeights.MULTIPLIED,
        *("input_gate_PD", "input_out_DP", "left_RD", "right_DR"),
    )


class StreamsFeedForward(DenseFeedForward):
    """A dense network, and what a layer does with its streams around it."""

    def __init__(self, place: PartPlace, weights: StreamsWeights) -> None:
        part = cast("StreamsSpec", place.spec.feed_forwards[place.index])
        self._part, self.active = part, part.active

        def adapt(linear: Linear, name: str, ranks: TensorParallel | None) -> Linear:
            adapted = place.adapt(linear, name, ranks)
            if name != "gate_up" or part.cutoff is None:
                return adapted
            return _SparseGate(adapted, part.cutoff, part.intermediate_size, place)

        super().__init__(place if part.cutoff is None else replace(place, adapt=adapt), weights)
        operations, eps = place.operations, place.spec.rms_norm_eps
        self._layer, self._handed, self._tanh = place.index, place.handed, operations.tanh
        self._kept = {name: getattr(weights, name) for name in _KEPT}
        self._router_scale = place.spec.hidden_size**-1.0
        self._router_norm = operations.rms_norm(weights.router_norm_D, eps)
        self._laurel_norm = operations.rms_norm(weights.laurel_norm_D, eps)
        self._input_norm = operations.rms_norm(weights.input_norm_D, eps)
        self._active_scale_D = weights.active_scale_D.to(operations.device)
        self._router = operations.linear(weights.router_SD)
        self._prediction = operations.linear(weights.prediction_XS)
        self._correction = operations.linear(weights.correction_SS)
        self._left = place.adapt(operations.linear(weights.left_RD), "laurel_left", None)
        self._right = place.adapt(operations.linear(weights.right_DR), "laurel_right", None)
        around: Callable[[Linear], Linear] | None = (
            None if place.adapt is unadapted else lambda linear: place.adapt(linear, "layer_input_gate", None)
        )
        gate = place.spec.gates(place.index).dense
        self._gate = operations.activated_linear(weights.input_gate_PD, None, gate, around)
        self._out = place.adapt(operations.linear(weights.input_out_DP), "layer_input", None)

    def predicted(self, h_TX: Tensor) -> Tensor:
        """Return all streams, [T, S, D], before the layer, for hidden states [T, S · D]."""
        num = self._part.num_streams
        h_TSD = h_TX.view(len(h_TX), num, -1)
        factors_TSS = self._prediction(self._modalities(h_TSD[:, self.active])).view(-1, num, num)
        # one after the other, so that bits of a token don't depend on other tokens
        predicted_TSD = factors_TSS[:, :, :1] * h_TSD[:, :1]
        for each in range(1, num):
            predicted_TSD.addcmul_(factors_TSS[:, :, each, None], h_TSD[:, each, None])
        return predicted_TSD.add_(h_TSD)

    def laurel(self, x_TD: Tensor) -> Tensor:
        """Return what is added beside attention, for its input."""
        return x_TD + self._laurel_norm(self._right(self._left(x_TD)))

    def corrected(self, predicted_TSD: Tensor, out_TD: Tensor) -> Tensor:
        """Return hidden states [T, S · D] after the layer, whose active stream has become `out_TD`."""
        factors_TS = self._correction(self._modalities(out_TD)).add_(1.0)
        change_TD = out_TD - predicted_TSD[:, self.active]
        corrected_TSD = torch.addcmul(predicted_TSD, factors_TS[:, :, None], change_TD[:, None])
        # a copy also of a single token, whose row is contiguous already
        active_TD = corrected_TSD[:, self.active].clone()
        if self._part.scales_active:
            active_TD.mul_(self._active_scale_D)
        gated_TP = self._gate(active_TD).mul_(self._handed.inputs(self._layer))
        corrected_TSD[:, 1:] += self._input_norm(self._out(gated_TP))[:, None]
        return corrected_TSD.flatten(1)

    def _modalities(self, x_TD: Tensor) -> Tensor:
        routed_TS = self._router(self._router_norm(x_TD.contiguous()).mul_(self._router_scale))
        return self._tanh(routed_TS.float()).to(x_TD.dtype)

    def weights(self) -> StreamsWeights:
        linears: dict[str, Any] = {
            "input_gate_PD": self._gate.weight,
            "input_out_DP": self._out.weight,
            "left_RD": self._left.weight,
            "right_DR": self._right.weight,
            "router_SD": self._router.weight,
            "prediction_XS": self._prediction.weight,
            "correction_SS": self._correction.weight,
        }
        return StreamsWeights(**vars(super().weights()), **linears, **self._kept)


class _SparseGate(AroundLinear):
    """The linear layer of gate and up, of whose gate few numbers are left. Implements `Linear`."""

    def __init__(self, linear: Linear, cutoff: float, size: int, place: PartPlace) -> None:
        super().__init__(linear)
        self._cutoff, self._size = cutoff, size
        self._sums = partial(place.operations.sums_over_ranks, ranks=place.ranks)

    def __call__(self, x_TI: Tensor) -> Tensor:
        gate_up_TF = self._linear(x_TI)
        gate_TF = gate_up_TF[:, : gate_up_TF.shape[1] // 2]
        wide_TF = gate_TF.float()
        mean_T1 = self._sums(wide_TF, squared=False) / self._size
        deviation_T1 = (self._sums(wide_TF - mean_T1, squared=True) / self._size).sqrt_()
        # rounded, as in transformers' code: what is left is a small difference
        dtype = gate_TF.dtype
        scaled_T1 = deviation_T1.to(dtype) * torch.tensor(self._cutoff, dtype=dtype, device=gate_TF.device)
        gate_TF.sub_(mean_T1.to(dtype) + scaled_T1).relu_()
        return gate_up_TF

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return residual_TO.add_(self(x_TI))
