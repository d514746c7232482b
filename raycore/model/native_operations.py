"""`Operations` with native kernels for CPUs, for what plain torch is slow at."""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.model.operations import Norm, TorchOperations


class NativeOperations(TorchOperations):
    """Norms, activations and the choice of the most likely token are native kernels. `raycore.kernels` is loaded."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        super().__init__(torch.device("cpu"), batch_invariant=batch_invariant)

    def rms_norm(self, weight_D: Tensor, eps: float) -> Norm:
        return _NativeNorm(weight_D, eps)

    def silu_and_mul(self, gate_up_TF: Tensor) -> Tensor:
        return torch.ops.raycore.silu_and_mul.default(gate_up_TF)

    def most_likely(self, logits_RV: Tensor) -> Tensor:
        return torch.ops.raycore.most_likely.default(logits_RV)


class _NativeNorm:
    def __init__(self, weight_D: Tensor, eps: float) -> None:
        self._weight_D = weight_D
        self._eps = eps
        self._rms_norm = torch.ops.raycore.rms_norm.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self._weight_D, self._eps)
