"""`Operations` with native kernels for CPUs, for what plain torch is slow at."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raycore.model.layers import Linear
from raycore.model.operations import Norm, TorchOperations
from raycore.model.sampling.picking import DrawLimits

_FEW_ROWS = 4
"""So many rows are computed while the weight is streamed once."""


class NativeOperations(TorchOperations):
    """Native kernels compute norms, activations, the head for a few rows, and pick tokens.

    `raycore.kernels` must be loaded.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        super().__init__(torch.device("cpu"), batch_invariant=batch_invariant)

    def head(self, weight_VD: Tensor, *, is_tied: bool) -> Linear:
        packed = self.linear(weight_VD)
        is_even = weight_VD.shape[1] % 2 == 0
        return _FewRowsLinear(weight_VD, packed) if is_tied and is_even and not self._batch_invariant else packed

    def rms_norm(self, weight_D: Tensor, eps: float) -> Norm:
        return _NativeNorm(weight_D, eps)

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        return torch.ops.raycore.silu_and_mul.default(gate_up_TF)

    def most_likely(self, logits_RV: Tensor) -> Tensor:
        return torch.ops.raycore.most_likely.default(logits_RV)

    def draw(self, logits_RV: Tensor, limits: DrawLimits) -> Tensor:
        limits_R5 = np.stack(limits, axis=1, dtype=np.float64)
        return torch.ops.raycore.draw.default(logits_RV, torch.as_tensor(limits_R5))


class _FewRowsLinear:
    """A linear layer whose weight is in memory twice: packed, and as it is, for a few rows.

    oneDNN's packed form reaches half of the memory bandwidth with one row.
    """

    def __init__(self, weight_OI: Tensor, packed: Linear) -> None:
        self._weight_OI = weight_OI
        self._packed = packed
        self._few_rows_linear = torch.ops.raycore.few_rows_linear.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._few_rows_linear(x_TI, self._weight_OI) if len(x_TI) <= _FEW_ROWS else self._packed(x_TI)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return self._packed.add_to(residual_TO, x_TI)


class _NativeNorm:
    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self._weight_D = weight_D
        self._eps = eps
        self._rms_norm = torch.ops.raycore.rms_norm.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self._weight_D, self._eps)
