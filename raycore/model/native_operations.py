"""`Operations` with native kernels for CPUs, for what plain torch is slow at."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raycore.kernels import library as kernels
from raycore.model.layers import Linear, ReducedLinear, TensorParallel
from raycore.model.operations import GatedLinear, Norm, TorchOperations
from raycore.model.sampling.logprobs import Logprobs, logprobs
from raycore.model.sampling.picking import DrawLimits

_MAX_LIKELY = 64
"""Of so many tokens, the native kernel computes log probabilities."""
_FEW_ROWS = 4
"""So many rows are computed while the weight is streamed once."""


class NativeOperations(TorchOperations):
    """Native kernels compute norms and activations, pick tokens, and compute linear layers where they are faster.

    `raycore.kernels` must be loaded.
    """

    def __init__(self, *, batch_invariant: bool = False) -> None:
        super().__init__(torch.device("cpu"), batch_invariant=batch_invariant)

    def linear(self, weight_OI: Tensor, bias_O: Tensor | None = None, ranks: TensorParallel | None = None) -> Linear:
        if not _fits_tiles(weight_OI):
            return super().linear(weight_OI, bias_O, ranks)
        linear = _TileLinear(weight_OI, bias_O)
        return ReducedLinear(linear, ranks) if ranks is not None and ranks.size > 1 else linear

    def gated_linear(self, gate_up_OI: Tensor, bias_O: Tensor | None = None) -> GatedLinear:
        if not _fits_tiles(gate_up_OI) or gate_up_OI.shape[0] % 32:
            return super().gated_linear(gate_up_OI, bias_O)
        return _GatedTileLinear(gate_up_OI, bias_O)

    def head(self, weight_VD: Tensor, *, is_tied: bool) -> Linear:
        packed = self.linear(weight_VD)
        if isinstance(packed, _TileLinear):
            return packed
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

    def logprobs(self, logits_RV: Tensor, token_ids_R: Tensor, num_likely: int) -> Logprobs:
        if num_likely > _MAX_LIKELY:
            return logprobs(logits_RV, token_ids_R, num_likely, row_by_row=True)
        return Logprobs(*torch.ops.raycore.logprobs.default(logits_RV, token_ids_R, num_likely))


def _fits_tiles(weight_OI: Tensor) -> bool:
    """Whether AMX can multiply with this weight."""
    num_outputs, num_inputs = weight_OI.shape
    is_bfloat16 = weight_OI.dtype == torch.bfloat16 and kernels.load() == "amx"
    return is_bfloat16 and num_outputs % 16 == 0 and num_inputs % 32 == 0


class _TileLinear:
    """A linear layer whose weight is packed for AMX.

    For a few rows, it reads the weight faster than oneDNN does on these processors. A row's result doesn't depend on
    other rows.
    """

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed_OI = torch.ops.raycore.pack_linear.default(weight_OI.contiguous())
        self._bias_O = weight_OI.new_empty(0) if bias_O is None else bias_O
        self._tile_linear = torch.ops.raycore.tile_linear.default
        self._add_tile_linear = torch.ops.raycore.add_tile_linear.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._tile_linear(x_TI, self._packed_OI, self._bias_O)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        self._add_tile_linear(residual_TO, x_TI, self._packed_OI, self._bias_O)
        return residual_TO


class _GatedTileLinear:
    """`silu(gate(x)) · up(x)` with a weight that is packed for AMX, 16 rows of the gate beside 16 rows of up."""

    def __init__(self, gate_up_OI: Tensor, bias_O: Tensor | None) -> None:
        self._packed_OI = torch.ops.raycore.pack_linear.default(_side_by_side(gate_up_OI))
        self._bias_O = gate_up_OI.new_empty(0) if bias_O is None else _side_by_side(bias_O)
        self._gated_tile_linear = torch.ops.raycore.gated_tile_linear.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._gated_tile_linear(x_TI, self._packed_OI, self._bias_O)


def _side_by_side(gate_up_OX: Tensor) -> Tensor:
    """Return the rows in another order: 16 rows of the first half, 16 of the second half, and so on."""
    return gate_up_OX.view(2, -1, 16, *gate_up_OX.shape[1:]).transpose(0, 1).reshape(gate_up_OX.shape)


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
