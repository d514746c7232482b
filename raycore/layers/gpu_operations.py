"""`Operations` with Triton kernels for GPUs. Matrix products are torch's own."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from raycore.kernels.gates import has_kernels
from raycore.kernels.gpu import experts, fp8, linear, rows
from raycore.layers.linear import Linear
from raycore.layers.operations import Norm, Operations
from raycore.models.spec import Gate
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.layers.routed_experts import NoteChoices, RoutedExperts, ignore_choices
from raycore.parts.experts.layers.router import TorchRouter
from raycore.parts.experts.models import MoeSpec
from raycore.parts.experts.weights import ExpertWeights, MoeWeights
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.weight import Weight


class GpuOperations(Operations):
    """Triton kernels compute norms, gates and experts. None of them waits for the GPU."""

    def _linear_of_one_rank(self, weight_OI: Weight, bias_O: Tensor | None) -> Linear:
        if isinstance(weight_OI, Fp8Weight | IntegerWeight | IntegerParts) or not self._batch_invariant:
            return super()._linear_of_one_rank(weight_OI, bias_O)
        return _InvariantLinear(weight_OI.to(self.device), None if bias_O is None else bias_O.to(self.device))

    def quantize_rows(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        return fp8.quantize_rows(x_TI)

    def rms_norm(self, weight_D: Tensor, eps: float, offset: float = 0.0) -> Norm:
        return _GpuNorm(weight_D.to(self.device), eps, offset)

    def gate_and_mul(self, gate: Gate, gate_up_TF: Tensor) -> Tensor:
        return rows.gate_and_mul(gate, gate_up_TF) if has_kernels(gate) else super().gate_and_mul(gate, gate_up_TF)

    def sigmoid(self, x_TE: Tensor) -> Tensor:
        return x_TE.sigmoid()

    def softplus(self, x_TE: Tensor) -> Tensor:
        return torch.nn.functional.softplus(x_TE.float()).to(x_TE.dtype)

    def experts(
        self, spec: MoeSpec, weights: MoeWeights, gate: Gate = "silu", ranks: TensorParallel | None = None
    ) -> RoutedExperts:
        if not has_kernels(gate) or not spec.is_gated or spec.weighs_inputs:
            return super().experts(spec, weights, gate, ranks)
        return _GroupedExperts(spec, weights, self, gate, self._batch_invariant)


class _GpuNorm:
    """A norm over the last dimension."""

    def __init__(self, weight_D: Tensor, eps: float, offset: float) -> None:
        self.weight = weight_D
        self._eps = eps
        self._offset = offset

    def __call__(self, x: Tensor) -> Tensor:
        return rows.rms_norm(x, self.weight, self._eps, self._offset)


class _InvariantLinear:
    """A linear layer in which a row's bits don't depend on the other rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self.weight = weight_OI
        self.bias = bias_O

    def __call__(self, x_TI: Tensor) -> Tensor:
        return linear.batch_invariant_linear(x_TI, self.weight, self.bias, None)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return linear.batch_invariant_linear(x_TI, self.weight, self.bias, residual_TO)


class _GroupedExperts:
    """Experts that are computed together, with their tokens grouped on the device."""

    in_parts = False

    def __init__(
        self, spec: MoeSpec, weights: MoeWeights, operations: GpuOperations, gate: Gate, batch_invariant: bool
    ) -> None:
        self._spec = spec
        self._gate: Gate = gate
        self.router = TorchRouter(spec, weights, operations)
        self.note: NoteChoices = ignore_choices
        self._first = weights.first_expert
        self._stacked = weights.stacked.map_tensors(lambda each: each.to(operations.device))
        self._batch_invariant = batch_invariant

    def __call__(self, x_ND: Tensor, read_NI: Tensor) -> Tensor:
        weights_NK, ids_NK = self._route(x_ND)
        self.note(ids_NK)
        gate_up_EFD, down_EDF = self._stacked.tensors[:2]
        return experts.apply_experts(
            read_NI,
            weights_NK,
            ids_NK,
            gate_up_EFD,
            down_EDF,
            self._first,
            gate_up_bias_EF=self._stacked.gate_up_bias_F,
            down_bias_ED=self._stacked.down_bias_D,
            gate=self._gate,
            batch_invariant=self._batch_invariant,
        )

    def _route(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        spec, router = self._spec, self.router
        logits_NE, correction_E = router.logits(x_ND), router.correction_E
        weights_NK, ids_NK = experts.route(logits_NE, spec.num_experts_per_tok, spec.router, x_ND.dtype, correction_E)
        return router.scaled(weights_NK, ids_NK), ids_NK

    def weights_of(self, expert: int) -> ExpertWeights:
        return self._stacked.map_tensors(lambda each: each[expert - self._first])

    def set_experts(self, experts: range, received: Mapping[int, ExpertWeights]) -> None:
        local = [received.get(expert) or self.weights_of(expert) for expert in experts]
        stacked = self._stacked.map_tensors(lambda each: each.new_empty(len(local), *each.shape[1:]))
        for index, expert in enumerate(local):
            for out_EX, weight_X in zip(stacked.tensors, expert.tensors, strict=True):
                out_EX[index].copy_(weight_X)
        self._stacked, self._first = stacked, experts.start
