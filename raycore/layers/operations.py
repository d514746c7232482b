"""The operations of a layer other than attention, as the decoder uses them, in plain torch.

They run on every device, and tests compare those of subclasses with them: `NativeOperations` (`native_operations.py`)
and `GpuOperations` (`gpu_operations.py`) compute with kernels of their own what plain torch is slow at.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import repeat
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raycore.layers.fp8_linear import Fp8Linear
from raycore.layers.gate import activate, gate_and_mul
from raycore.layers.head_linear import EachHeadLinear, PerHeadLinear, TorchHeadLinear
from raycore.layers.linear import (
    AroundLinear,
    Linear,
    LinearInParts,
    LinearParts,
    ReducedLinear,
    TiledLinear,
    make_linear,
)
from raycore.layers.norm import AddLayerNorm, GroupNorm, LayerNorm, OwnHeadNorm, RMSNorm, WidthNorm, sums_over_ranks
from raycore.layers.rows import TILE_ROWS, Tiles, on_one_thread, row_by_row
from raycore.models.spec import Gate
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.layers.routed_experts import RoutedExperts, TorchExperts
from raycore.parts.experts.models import MoeSpec
from raycore.parts.experts.weights import MoeWeights
from raycore.weights.fp8_weight import Fp8Weight, quantize_rows
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.weight import Weight

Activation = Gate | Callable[[Tensor], Tensor]
"""An activation's name, or what computes it: gets [T, F], which it may overwrite, and returns [T, F]. A row of the
result depends only on the same row."""


class GatedLinear(Protocol):
    """A layer that returns `activation(gate(x)) · up(x)`, [T, F], for `x` [T, D], or what its `Gate` says instead.

    Without a gate, it returns `activation(up(x))`.
    """

    @property
    def weight(self) -> Weight:
        """The weight that the layer was made of: a copy, if the layer keeps it in another form."""
        ...

    @property
    def bias(self) -> Tensor | None: ...

    def __call__(self, x_TI: Tensor) -> Tensor:
        """Return the layer's output for `x_TI`."""
        ...


class Norm(Protocol):
    """A norm over the last dimension, with its weight."""

    @property
    def weight(self) -> Tensor: ...

    def __call__(self, x: Tensor) -> Tensor:
        """Return a normalized copy of `x`."""
        ...


class AddNorm(Protocol):
    """A norm of the residual stream after a block's result has been added."""

    def __call__(self, residual_TD: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Return the stream in float32, and the normalized sum in the dtype of `x_TD`. May overwrite both arguments."""
        ...


def check_tiles(operations: Operations, ranks: TensorParallel) -> bool:
    """For batch invariance: test whether a row's result has the same bits wherever in a tile the row is.

    If the test fails on any rank, rows are computed one at a time from now on. All ranks must call this at the same
    time.
    """
    num_failures = torch.tensor([float(not operations.check_tiles())], device=operations.device)
    is_kept = not ranks.all_reduce_(num_failures).item()
    if not is_kept:
        operations.compute_rows_alone()
    return is_kept


class _GatedLinear(AroundLinear):
    """A linear layer, and the activation of its output, with or without a gate."""

    def __init__(self, linear: Linear, activate: Callable[[Tensor], Tensor]) -> None:
        super().__init__(linear)
        self._activate = activate

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._activate(self._linear(x_TI))


class Operations:
    """Makes a model's layers, and computes what lies between them. Row i of a result depends only on row i of `x`."""

    def __init__(self, device: torch.device, *, batch_invariant: bool = False) -> None:
        """`batch_invariant`: make the bits of each row's result independent of the other rows."""
        self.device = device
        self._batch_invariant = batch_invariant
        self._tiles = Tiles()
        self._tiled: WeakKeyDictionary[TiledLinear, tuple[int, torch.dtype]] = WeakKeyDictionary()
        """The size and the dtype of the rows of each linear layer that is in use."""

    def linear(self, weight_OI: Weight, bias_O: Tensor | None = None, ranks: TensorParallel | None = None) -> Linear:
        """Return the linear layer `x @ weight.T + bias`. With `ranks`, results are summed over these ranks.

        If the weight is in fp8 or in integers, so is the product. With batch invariance, other sums have the same bits
        for 1, 2 and 4 ranks: see `LinearInParts`.
        """
        if self._batch_invariant and ranks is not None and isinstance(weight_OI, Tensor):
            count = ranks.num_parts(weight_OI.shape[1])
            if count:
                return LinearInParts(self.linear_parts(weight_OI, bias_O, count), ranks)
        linear = self._linear_of_one_rank(weight_OI, bias_O)
        return ReducedLinear(linear, ranks) if ranks is not None and ranks.size > 1 else linear

    def linear_parts(self, weight_OI: Tensor, bias_O: Tensor | None, count: int) -> LinearParts:
        """Return a linear layer whose inputs are divided into `count` parts."""
        biases = bias_O, *repeat(None, count - 1)
        weights = [part.contiguous() for part in weight_OI.chunk(count, dim=1)]
        return LinearParts([self._linear_of_one_rank(*part) for part in zip(weights, biases, strict=True)])

    def head_linear(self, weight_NOI: Tensor) -> PerHeadLinear:
        """Return a linear layer for each head of a token."""
        if self._batch_invariant:
            return EachHeadLinear([self.linear(weight_OI) for weight_OI in weight_NOI])
        return TorchHeadLinear(weight_NOI.to(self.device))

    def head(self, weight_VD: Tensor | IntegerWeight, *, is_tied: bool) -> Linear:
        """Return the linear layer that computes logits. `is_tied`: a tensor stays in memory, for the embedding. Of
        integers, an `IntegerLinear` is returned, which has the embedding's rows."""
        return self.linear(weight_VD)

    def quantize_rows(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """Return `x_TI` in fp8, [T, I], and each row's scale, [T, 1]."""
        return quantize_rows(x_TI)

    def rms_norm(self, weight_D: Tensor, eps: float, offset: float = 0.0) -> Norm:
        """Return the norm `x / sqrt(mean(x²) + eps) · (offset + weight)`."""
        return RMSNorm(weight_D.to(self.device), eps, self._batch_invariant, offset)

    def layer_norm(self, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Norm:
        """Return the norm `(x - mean(x)) / sqrt(variance(x) + eps) · weight + bias`."""
        bias_D = None if bias_D is None else bias_D.to(self.device)
        return LayerNorm(weight_D.to(self.device), bias_D, eps, batch_invariant=self._batch_invariant)

    def add_layer_norm(self, weight_D: Tensor, bias_D: Tensor | None, eps: float, *, keeps_sum: bool) -> AddNorm:
        """Return what adds to the residual stream and computes its layer norm. See `AddLayerNorm`."""
        weight_D, bias_D = weight_D.to(self.device), None if bias_D is None else bias_D.to(self.device)
        return AddLayerNorm(weight_D, bias_D, eps, keeps_sum=keeps_sum, batch_invariant=self._batch_invariant)

    def activated_linear(
        self,
        up_OI: Weight,
        bias_O: Tensor | None,
        activation: Activation,
        around: Callable[[Linear], Linear] | None = None,
    ) -> GatedLinear:
        """Return a linear layer with an activation after it.

        `around`: returns the linear layer with what is around it.
        """
        compute = activation if callable(activation) else partial(activate, activation)
        if self._batch_invariant:
            # torch's own kernel for GELU needs no loop for each row
            compute = partial(on_one_thread, compute if activation == "gelu" else row_by_row(compute))
        up = self.linear(up_OI, bias_O)
        return _GatedLinear(up if around is None else around(up), compute)

    def gated_linear(
        self,
        gate_up_OI: Weight,
        bias_O: Tensor | None = None,
        around: Callable[[Linear], Linear] | None = None,
        gate: Gate = "silu",
    ) -> GatedLinear:
        """Return a gated layer. `gate_up_OI` has the rows of the gate, then those of up.

        Args:
            around: returns the linear layer of gate and up with what is around it.
            gate: what is computed of both.
        """
        gate_up = self.linear(gate_up_OI, bias_O)
        return _GatedLinear(gate_up if around is None else around(gate_up), partial(self.gate_and_mul, gate))

    def gate_and_mul(self, gate: Gate, gate_up_TF: Tensor) -> Tensor:
        """Return `activation(gate) · up`, [T, F], or what `gate` says instead. May overwrite `gate_up_TF`.

        It has the gate columns, then the up columns.
        """
        compute = partial(gate_and_mul, gate)
        return on_one_thread(compute, gate_up_TF) if self._batch_invariant else compute(gate_up_TF)

    def width_norm(self, q_weight_O: Tensor, k_weight_O: Tensor, eps: float, ranks: TensorParallel) -> WidthNorm:
        """Return the norms of queries and keys over all heads together. The arguments are those of `WidthNorm`."""
        weights = q_weight_O.to(self.device), k_weight_O.to(self.device)
        return WidthNorm(*weights, eps, ranks, batch_invariant=self._batch_invariant)

    def own_head_norm(self, weight_NH: Tensor, eps: float) -> OwnHeadNorm:
        """Return the layer norms of query and key heads. The arguments are those of `OwnHeadNorm`."""
        return OwnHeadNorm(weight_NH.to(self.device), eps, batch_invariant=self._batch_invariant)

    def group_norm(self, weight_O: Tensor, num_groups: int, eps: float, ranks: TensorParallel) -> Norm:
        """Return the norm of groups of elements. The arguments are those of `GroupNorm`."""
        weight_O = weight_O.to(self.device)
        return GroupNorm(weight_O, num_groups, eps, ranks, batch_invariant=self._batch_invariant)

    def sums_over_ranks(self, x_TX: Tensor, ranks: TensorParallel, *, squared: bool) -> Tensor:
        """Return the sums [T, 1] of rows that are divided over ranks, or of their squares."""
        return sums_over_ranks([x_TX.unsqueeze(1)], ranks, batch_invariant=self._batch_invariant, squared=squared)

    def tanh(self, x_TX: Tensor) -> Tensor:
        """Return the hyperbolic tangent of each element."""
        return on_one_thread(row_by_row(torch.tanh), x_TX) if self._batch_invariant else x_TX.tanh()

    def sigmoid(self, x_TE: Tensor) -> Tensor:
        """Return `1 / (1 + exp(-x))` of each element."""
        return on_one_thread(row_by_row(torch.sigmoid), x_TE) if self._batch_invariant else x_TE.sigmoid()

    def softplus(self, x_TE: Tensor) -> Tensor:
        """Return `ln(1 + exp(x))` of each element, computed in float32."""
        return on_one_thread(row_by_row(_softplus), x_TE) if self._batch_invariant else _softplus(x_TE)

    def experts(
        self, spec: MoeSpec, weights: MoeWeights, gate: Gate = "silu", ranks: TensorParallel | None = None
    ) -> RoutedExperts:
        """Return a sparse layer's experts that this rank holds, with the layer's router.

        `ranks`: those over which each expert is divided. With batch invariance, the bits of the sums over 1, 2 and 4
        of them are the same.
        """
        num_parts = 0
        if self._batch_invariant and ranks is not None and isinstance(weights.down_EDF, Tensor):
            num_parts = ranks.num_parts(weights.down_EDF.shape[2])
        return TorchExperts(spec, weights, self, gate, num_parts)

    @property
    def depends_on_threads(self) -> bool:
        """For batch invariance: whether the bits of results depend on the number of compute threads."""
        return bool(self._tiled)

    def check_tiles(self) -> bool:
        """For batch invariance: whether a row's result has the same bits wherever in a tile the row is.

        Tests all linear layers made so far, with random rows. Ranks whose results are summed must call this together.
        """
        generator = torch.Generator().manual_seed(0)
        checks: list[bool] = []
        for linear, (num_inputs, dtype) in self._tiled.items():
            x_TI = torch.randn(TILE_ROWS, num_inputs, generator=generator).to(self.device, dtype)
            checks.append(linear.is_order_invariant(x_TI))
        return all(checks)

    def unshortened(self) -> Operations:
        """Return operations whose layers store all weights in their own dtype, also if a shorter one would do."""
        return self

    def compute_rows_alone(self) -> None:
        """Compute linear layers one row at a time from now on, because tiles aren't batch-invariant here."""
        self._tiles.num_rows = 1

    def _linear_of_one_rank(self, weight_OI: Weight, bias_O: Tensor | None) -> Linear:
        """Return the linear layer `x @ weight.T + bias`."""
        assert not isinstance(weight_OI, IntegerWeight | IntegerParts), "torch doesn't multiply with these integers"
        weight_OI, bias_O = weight_OI.to(self.device), None if bias_O is None else bias_O.to(self.device)
        if isinstance(weight_OI, Fp8Weight):
            assert not self._batch_invariant, "fp8 products aren't batch-invariant"
            return Fp8Linear(weight_OI, bias_O, self.quantize_rows)
        linear = make_linear(weight_OI, bias_O)
        if not self._batch_invariant:
            return linear
        tiled = TiledLinear(linear, self._tiles)
        self._tiled[tiled] = weight_OI.shape[1], weight_OI.dtype
        return tiled


def _softplus(x_TE: Tensor) -> Tensor:
    return torch.nn.functional.softplus(x_TE.float()).to(x_TE.dtype)
