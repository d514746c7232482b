"""`Operations` with native kernels for CPUs, for what plain torch is slow at."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raycore.kernels.gates import has_kernels, native_gate_arguments
from raycore.layers.head_linear import PerHeadLinear
from raycore.layers.integer_linear import GatedIntegerLinear, IntegerLinear, LinearOfParts
from raycore.layers.linear import Linear, can_pack
from raycore.layers.operations import Activation, AddNorm, GatedLinear, Norm, Operations
from raycore.layers.panels import PANEL_OUTPUTS, one_after_the_other, side_by_side, unpack_panels
from raycore.models.spec import Gate
from raycore.weights.fp8_weight import Fp8Weight
from raycore.weights.gathered import GatheredRows, Unmade
from raycore.weights.integer_parts import IntegerParts
from raycore.weights.integer_weight import IntegerWeight
from raycore.weights.weight import Weight

_FEW_ROWS = 4
"""So many rows are computed while the weight is streamed once."""


class NativeOperations(Operations):
    """Native kernels compute norms and gates, and linear layers where they are faster.

    `raycore.kernels` must be loaded.
    """

    def __init__(self, *, batch_invariant: bool = False, shortens: bool = True) -> None:
        """`shortens`: store float32 weights in 16 bits if all their numbers fit. This halves what a step reads of them,
        which counts with few rows. With many rows, widening them again takes a fifth longer."""
        super().__init__(torch.device("cpu"), batch_invariant=batch_invariant)
        self._shortens = shortens
        self._shortens_heads = True

    def unshortened(self) -> NativeOperations:
        made = NativeOperations(batch_invariant=self._batch_invariant, shortens=False)
        made._shortens_heads = False
        return made

    def _linear_of_one_rank(self, weight_OI: Weight, bias_O: Tensor | None) -> Linear:
        assert not isinstance(weight_OI, Fp8Weight), "CPUs don't multiply in fp8"
        if isinstance(weight_OI, IntegerWeight):
            return IntegerLinear(weight_OI, bias_O)
        if isinstance(weight_OI, IntegerParts):
            return LinearOfParts(weight_OI, bias_O)
        if _is_native(weight_OI):
            return _PanelLinear(weight_OI, bias_O, shortens=self._shortens)
        return super()._linear_of_one_rank(weight_OI, bias_O)

    def gated_linear(
        self,
        gate_up_OI: Weight,
        bias_O: Tensor | None = None,
        around: Callable[[Linear], Linear] | None = None,
        gate: Gate = "silu",
    ) -> GatedLinear:
        assert not isinstance(gate_up_OI, Fp8Weight), "CPUs don't multiply in fp8"
        if around is not None or not has_kernels(gate) or gate_up_OI.shape[0] % (2 * PANEL_OUTPUTS):
            return super().gated_linear(gate_up_OI, bias_O, around, gate)
        if isinstance(gate_up_OI, IntegerWeight):
            return GatedIntegerLinear(gate_up_OI, bias_O, gate)
        if isinstance(gate_up_OI, IntegerParts) or not _is_native(gate_up_OI):
            return super().gated_linear(gate_up_OI, bias_O, gate=gate)
        return _GatedPanelLinear(gate_up_OI, bias_O, gate, shortens=self._shortens)

    def head_linear(self, weight_NOI: Tensor) -> PerHeadLinear:
        can_pack_pairs = weight_NOI.dtype != torch.bfloat16 or weight_NOI.shape[2] % 2 == 0
        return (
            _PanelHeadLinear(weight_NOI, shortens=self._shortens_heads)
            if can_pack_pairs
            else super().head_linear(weight_NOI)
        )

    def head(self, weight_VD: Tensor | IntegerWeight, *, is_tied: bool) -> Linear:
        head = self.linear(weight_VD)
        if isinstance(weight_VD, IntegerWeight) or isinstance(head, _PanelLinear):
            return head
        is_even = weight_VD.shape[1] % 2 == 0
        return _FewRowsLinear(weight_VD, head) if is_tied and is_even and not self._batch_invariant else head

    def rms_norm(self, weight_D: Tensor, eps: float, offset: float = 0.0) -> Norm:
        return _NativeNorm(weight_D, eps, offset)

    def layer_norm(self, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Norm:
        return _NativeLayerNorm(weight_D, bias_D, eps)

    def add_layer_norm(self, weight_D: Tensor, bias_D: Tensor | None, eps: float, *, keeps_sum: bool) -> AddNorm:
        return _NativeAddLayerNorm(weight_D, bias_D, eps, keeps_sum=keeps_sum)

    def activated_linear(
        self,
        up_OI: Weight,
        bias_O: Tensor | None,
        activation: Activation,
        around: Callable[[Linear], Linear] | None = None,
    ) -> GatedLinear:
        if callable(activation) or around is not None or not has_kernels(activation):
            return super().activated_linear(up_OI, bias_O, activation, around)
        if not isinstance(up_OI, Tensor) or not _is_native(up_OI):
            return super().activated_linear(up_OI, bias_O, activation)
        return _ActivatedPanelLinear(up_OI, bias_O, activation, shortens=self._shortens)

    def gate_and_mul(self, gate: Gate, gate_up_TF: Tensor) -> Tensor:
        if not has_kernels(gate):
            return super().gate_and_mul(gate, gate_up_TF)
        return torch.ops.raycore.gate_and_mul.default(gate_up_TF, *native_gate_arguments(gate))


def _is_native(weight_OI: Tensor) -> bool:
    """Whether the native kernels multiply with this weight at least as fast as oneDNN does."""
    if weight_OI.dtype == torch.float32:
        return True
    return weight_OI.shape[1] % 2 == 0 and (weight_OI.dtype == torch.bfloat16 or not can_pack(weight_OI.dtype))


def _pack(weight_OI: Tensor, *, shortens: bool) -> Tensor:
    """Return the weight in panels, with `shortens` in the shortest dtype that has all its numbers.

    Many checkpoints are in 16 bits. If they are computed in float32, half of the memory has to be read this way, and
    results are the same.
    """
    is_stored_as_it_is = not shortens or weight_OI.dtype != torch.float32
    if isinstance(weight_OI, GatheredRows) and is_stored_as_it_is:
        return _PackedRows.of(weight_OI)
    return torch.ops.raycore.pack_linear.default((_shortened(weight_OI) if shortens else weight_OI).contiguous())


class _PackedRows(Unmade):
    """Rows of several tensors, in panels."""

    _rows: GatheredRows

    @classmethod
    def of(cls, weight_OI: GatheredRows) -> _PackedRows:
        """Return the weight in panels."""
        num_rows = -(-len(weight_OI) // PANEL_OUTPUTS) * PANEL_OUTPUTS
        packed: _PackedRows = cls.of_shape(num_rows, weight_OI.shape[1], weight_OI.dtype)
        packed._rows = weight_OI
        return packed

    def copy_to(self, into: Tensor) -> None:
        for rows_RI, own_P in self._rows.pieces_in_panels(PANEL_OUTPUTS):
            torch.ops.raycore.pack_rows.default(into, rows_RI, own_P)

    def _make(self) -> Tensor:
        return torch.ops.raycore.pack_linear.default(self._rows.made())


def _pack_heads(weight_NOI: Tensor, *, shortens: bool = True) -> Tensor:
    """Return the weight of each head, all in the same dtype, as `_pack` does."""
    shortened_NOI = _shortened(weight_NOI) if shortens else weight_NOI
    return torch.stack([torch.ops.raycore.pack_linear.default(each_OI.contiguous()) for each_OI in shortened_NOI])


def _shortened(weight: Tensor) -> Tensor:
    """Return a weight [..., I] in the shortest dtype that has all its numbers."""
    shorter = [torch.bfloat16] * (weight.shape[-1] % 2 == 0) + [torch.float16]
    for dtype in shorter if weight.dtype == torch.float32 else []:
        short = weight.to(dtype)
        if torch.equal(short.float(), weight):
            return short
    return weight


class _PanelLinear:
    """A linear layer whose weight is packed in panels of 16 outputs. A row's result doesn't depend on other rows."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, *, shortens: bool) -> None:
        self._num_outputs = weight_OI.shape[0]
        self._dtype = weight_OI.dtype
        self._shortens = shortens
        self._packed_OI = _pack(weight_OI, shortens=shortens)
        self._bias_O = torch.empty(0, dtype=weight_OI.dtype) if bias_O is None else bias_O
        self._panel_linear = torch.ops.raycore.panel_linear.default
        self._add_panel_linear = torch.ops.raycore.add_panel_linear.default

    @property
    def weight(self) -> Tensor:
        return unpack_panels(self._packed_OI)[: self._num_outputs].to(self._dtype)

    def repack_(self, *, shortens: bool) -> None:
        """Store the weight in its own dtype, or with `shortens` as the layer would have stored it when it was made."""
        self._packed_OI.data = _pack(self.weight, shortens=shortens and self._shortens)

    @property
    def bias(self) -> Tensor | None:
        return self._bias_O if self._bias_O.numel() else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._panel_linear(x_TI, self._packed_OI, self._bias_O, self._num_outputs)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        self._add_panel_linear(residual_TO, x_TI, self._packed_OI, self._bias_O)
        return residual_TO


class _PanelHeadLinear:
    """A linear layer for each head, with weights in panels. A row's result doesn't depend on other rows."""

    def __init__(self, weight_NOI: Tensor, *, shortens: bool = True) -> None:
        self._num_outputs = weight_NOI.shape[1]
        self._dtype = weight_NOI.dtype
        self._packed_NOI = _pack_heads(weight_NOI, shortens=shortens)
        self._head_linear = torch.ops.raycore.head_linear.default

    @property
    def weight(self) -> Tensor:
        unpacked = [unpack_panels(packed_OI)[: self._num_outputs] for packed_OI in self._packed_NOI]
        return torch.stack(unpacked).to(self._dtype)

    def repack_(self, *, shortens: bool) -> None:
        """See `_PanelLinear`."""
        self._packed_NOI.data = _pack_heads(self.weight, shortens=shortens)

    def __call__(self, x_TNI: Tensor, out_TNO: Tensor) -> None:
        self._head_linear(x_TNI, self._packed_NOI, out_TNO)


class _GatedPanelLinear:
    """A gated layer with a weight that is packed in panels, a panel of the gate beside one of up."""

    def __init__(self, gate_up_OI: Tensor, bias_O: Tensor | None, gate: Gate, *, shortens: bool) -> None:
        self._dtype = gate_up_OI.dtype
        self._shortens = shortens
        self._packed_OI = _pack(side_by_side(gate_up_OI), shortens=shortens)
        self._bias_O = torch.empty(0, dtype=gate_up_OI.dtype) if bias_O is None else side_by_side(bias_O)
        self._gate = native_gate_arguments(gate)
        self._gated_panel_linear = torch.ops.raycore.gated_panel_linear.default

    @property
    def weight(self) -> Tensor:
        return one_after_the_other(unpack_panels(self._packed_OI)).to(self._dtype)

    def repack_(self, *, shortens: bool) -> None:
        """See `_PanelLinear`."""
        self._packed_OI.data = _pack(side_by_side(self.weight), shortens=shortens and self._shortens)

    @property
    def bias(self) -> Tensor | None:
        return one_after_the_other(self._bias_O) if self._bias_O.numel() else None

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._gated_panel_linear(x_TI, self._packed_OI, self._bias_O, *self._gate)


class _ActivatedPanelLinear(_PanelLinear):
    """A linear layer with an activation after it."""

    def __init__(self, weight_OI: Tensor, bias_O: Tensor | None, activation: Gate, *, shortens: bool) -> None:
        super().__init__(weight_OI, bias_O, shortens=shortens)
        self._activation = native_gate_arguments(activation)
        self._activated_panel_linear = torch.ops.raycore.activated_panel_linear.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._activated_panel_linear(x_TI, self._packed_OI, self._bias_O, self._num_outputs, *self._activation)


class _FewRowsLinear:
    """A linear layer whose weight is in memory twice: packed, and as it is, for a few rows.

    oneDNN's packed form reaches half of the memory bandwidth with one row.
    """

    def __init__(self, weight_OI: Tensor, packed: Linear) -> None:
        self.weight = weight_OI
        self.bias = None
        self._packed = packed
        self._few_rows_linear = torch.ops.raycore.few_rows_linear.default

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._few_rows_linear(x_TI, self.weight) if len(x_TI) <= _FEW_ROWS else self._packed(x_TI)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return self._packed.add_to(residual_TO, x_TI)


class _NativeNorm:
    def __init__(self, weight_D: Tensor, eps: float, offset: float) -> None:
        self.weight = weight_D
        self._eps = eps
        self._offset = offset
        self._rms_norm = torch.ops.raycore.rms_norm.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._rms_norm(x, self.weight, self._eps, self._offset)


class _NativeLayerNorm:
    def __init__(self, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        self.weight = weight_D
        self._bias_D = weight_D.new_empty(0) if bias_D is None else bias_D
        self._eps = eps
        self._layer_norm = torch.ops.raycore.layer_norm.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._layer_norm(x, self.weight, self._bias_D, self._eps)


class _NativeAddLayerNorm:
    def __init__(self, weight_D: Tensor, bias_D: Tensor | None, eps: float, *, keeps_sum: bool) -> None:
        self._arguments = weight_D, weight_D.new_empty(0) if bias_D is None else bias_D, eps, keeps_sum
        self._add_layer_norm = torch.ops.raycore.add_layer_norm.default

    def __call__(self, residual_TD: Tensor, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        self._add_layer_norm(residual_TD, x_TD, *self._arguments)
        return residual_TD, x_TD
