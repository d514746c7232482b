"""What LoRA adapters add to the outputs of linear layers, for the rows of the requests that use them.

An adapter adds `B (A x)` to the output of a layer for the input x, where A has few rows. Layers that are fused have an
A and a B for each of their parts. Shape suffixes: T rows of the step, I inputs of a layer, O its outputs, R rows of all
its A's, n rows that are for adapters, P outputs of a part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from raycore.layers.linear import AroundLinear, Linear
from raycore.messages import NO_ADAPTER
from raycore.models.spec import ModelSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.adapters.weights import LoraLinear, LoraWeights

Ints = NDArray[np.int64]

LinearKey = tuple[int, str] | str
"""Which linear layer it is: the index of its decoder layer among those of the stage, and its name there. In a network
of transformers, its name."""
MAX_PARTS = 3
"""How many projections a linear layer has at most that adapters change. The native kernels read as many."""


@dataclass(frozen=True)
class _PackedPart:
    """An adapter's part for one projection of a fused layer, as the native kernels read it."""

    first_row: int
    """The first of this part's rows of A."""
    rank: int
    """Number of these rows. Even: kernels read numbers of 16 bits in pairs."""
    first_output: int
    num_outputs: int
    b_PR: Tensor
    """B in panels."""


@dataclass(frozen=True)
class PackedLora:
    """An adapter's part for one fused linear layer, as the native kernels read it."""

    num_rows: int
    """Number of rows of A."""
    a_RI: Tensor
    """The matrices A of all parts, one below the other, in panels."""
    parts: list[_PackedPart]

    @classmethod
    def of(cls, own: LoraLinear) -> PackedLora:
        all_a_RI: list[Tensor] = []
        parts: list[_PackedPart] = []
        num_rows = 0
        for part in own.parts:
            rank = part.rank + part.rank % 2
            a_RI = own.a_RI[part.first_row :][: part.rank]
            all_a_RI.append(functional.pad(a_RI, (0, 0, 0, rank - part.rank)))
            b_PR = _packed(functional.pad(part.b_RO.t(), (0, rank - part.rank)))
            parts.append(_PackedPart(num_rows, rank, part.first_output, part.b_RO.shape[1], b_PR))
            num_rows += rank
        return cls(num_rows, _packed(torch.cat(all_a_RI)), parts)


def _packed(weight_OI: Tensor) -> Tensor:
    return torch.ops.raycore.pack_linear.default(weight_OI.contiguous())


@dataclass(frozen=True)
class ArrangedAdapter:
    """An adapter as layers use it."""

    linears: dict[LinearKey, Any]
    """What the linear layers' `put` takes. Those that the adapter doesn't change are absent."""


@dataclass(frozen=True)
class _Group:
    """Rows that are for one adapter."""

    slot: int
    rows: Tensor | None
    """int64. None: all."""


@dataclass(frozen=True)
class _SortedRows:
    """The rows that are for adapters. Those of the same adapter are adjacent."""

    rows_n: Tensor
    slots_n: Tensor


@dataclass(frozen=True)
class _Rows:
    """The rows of a layer's input that are for adapters, for whichever of the two computes them."""

    native: _SortedRows | None
    torch: list[_Group]


def can_be_native(spec: ModelSpec, tp_size: int) -> bool:
    """Whether the native kernels can compute adapters of this model. They read inputs in pairs."""
    if spec.implementation == "transformers":
        return not any(shape.rows(0, tp_size)[1].num % 2 for shape in spec.linears.values())
    linears = [each for kind in spec.part_kinds for each in kind.adapted_linears(spec, 0, tp_size).values()]
    return not any(linear.inputs.num % 2 for linear in linears)


class AdapterRows:
    """Which rows of the current step are for which adapter. All layers of a worker look here."""

    def __init__(self, device: torch.device, *, is_native: bool = False, batch_invariant: bool = False) -> None:
        """
        Args:
            is_native: whether native kernels compute what adapters add.
            batch_invariant: let a row's bits not depend on other rows.
        """
        self._device = device
        self.is_native = is_native
        self._batch_invariant = batch_invariant
        self._all: _Rows | None = None
        self._sampled: _Rows | None = None
        self._num_rows = 0

    @property
    def is_empty(self) -> bool:
        """Whether no row of the step is for an adapter."""
        return self._all is None

    def begin_step(self, adapter_slots_T: Ints, sampled_rows: Ints) -> None:
        """Take the step's rows.

        Args:
            adapter_slots_T: for each row, the slot of its adapter, or `NO_ADAPTER`.
            sampled_rows: the rows that the last layer keeps.
        """
        self.clear()
        if (adapter_slots_T != NO_ADAPTER).any():
            self._num_rows = len(adapter_slots_T)
            self._all = self._rows_of(adapter_slots_T)
            self._sampled = self._rows_of(adapter_slots_T[sampled_rows])

    def clear(self) -> None:
        """Forget the last step's rows: no row that is computed now is for an adapter."""
        self._all = self._sampled = None

    def of(self, num_rows: int) -> _Rows | None:
        """Return the rows of a layer's input that has so many rows: all of the step's, or those that are sampled.

        None: no row is for an adapter.
        """
        # if there are as many of both, they are the same
        return self._all if num_rows >= self._num_rows else self._sampled

    def _rows_of(self, slots: Ints) -> _Rows | None:
        own = np.flatnonzero(slots != NO_ADAPTER)
        if not len(own):
            return None
        rows = own[np.argsort(slots[own], kind="stable")]
        if self.is_native:
            return _Rows(_SortedRows(self._tensor(rows), self._tensor(slots[rows])), [])
        return _Rows(None, self._groups(rows, slots))

    def _groups(self, rows: Ints, slots: Ints) -> list[_Group]:
        if self._batch_invariant:
            return [_Group(int(slots[row]), self._tensor(row[None])) for row in rows]
        found, firsts, counts = np.unique(slots[rows], return_index=True, return_counts=True)
        return [
            _Group(slot, None if count == len(slots) else self._tensor(rows[first : first + count]))
            for slot, first, count in zip(found.tolist(), firsts, counts, strict=True)
        ]

    def _tensor(self, rows: Ints) -> Tensor:
        return torch.as_tensor(rows).to(self._device)


class AdaptedLinear(AroundLinear, ABC):
    """A linear layer, and what adapters add to it."""

    def __init__(self, linear: Linear, rows: AdapterRows, ranks: TensorParallel | None = None) -> None:
        """`ranks`: the ranks over which the layer's input is split. None: each of them has all of it."""
        super().__init__(linear)
        self._rows = rows
        self._ranks = ranks or TensorParallel()

    def __call__(self, x_TI: Tensor) -> Tensor:
        return self._add_(self._linear(x_TI), x_TI)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        return self._add_(self._linear.add_to(residual_TO, x_TI), x_TI)

    @abstractmethod
    def put(self, slot: int, own: Any) -> None:  # what `Adapters.arrange` returns for such layers
        """Put an adapter in a slot, instead of the one that is there. None: the adapter there adds nothing."""

    @abstractmethod
    def _add_(self, y_TO: Tensor, x_TI: Tensor) -> Tensor: ...


class TorchAdaptedLinear(AdaptedLinear):
    """Computed by torch, on any device."""

    def __init__(self, linear: Linear, rows: AdapterRows, ranks: TensorParallel | None = None) -> None:
        super().__init__(linear, rows, ranks)
        self._adapters: dict[int, LoraLinear] = {}

    def put(self, slot: int, own: LoraLinear | None) -> None:
        self._adapters.pop(slot, None)
        if own is not None:
            self._adapters[slot] = own

    def _add_(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        rows = self._rows.of(len(x_TI))
        for group in rows.torch if rows is not None else ():
            own = self._adapters.get(group.slot)
            if own is not None:
                self._add_group_(y_TO, x_TI, group.rows, own)
        return y_TO

    def _add_group_(self, y_TO: Tensor, x_TI: Tensor, rows: Tensor | None, own: LoraLinear) -> None:
        x_nI = x_TI if rows is None else x_TI.index_select(0, rows)
        a_nR = self._ranks.all_reduce_(torch.mm(x_nI, own.a_RI.t()))
        for part in own.parts:
            added_nP = torch.mm(a_nR[:, part.first_row : part.first_row + part.rank], part.b_RO)
            y_TP = y_TO[:, part.first_output : part.first_output + added_nP.shape[1]]
            if rows is None:
                y_TP += added_nP
            else:
                y_TP.index_add_(0, rows, added_nP)


class NativeAdaptedLinear(AdaptedLinear):
    """Computed by native kernels."""

    def __init__(self, linear: Linear, rows: AdapterRows, num_slots: int, ranks: TensorParallel | None = None) -> None:
        """`num_slots`: number of adapters that there may be."""
        super().__init__(linear, rows, ranks)
        self._adapters: dict[int, PackedLora] = {}
        self._width = 1
        """The largest number of rows of an adapter's A."""
        self._table = np.zeros((num_slots, 2 + 5 * MAX_PARTS), np.int64)
        """[slots, 17]: the adapters, as the native kernels read them."""
        self._shared_table = torch.as_tensor(self._table)
        """The same memory."""

    def put(self, slot: int, own: PackedLora | None) -> None:
        self._adapters.pop(slot, None)
        row = self._table[slot]
        row[:] = 0
        if own is None:
            return
        self._adapters[slot] = own
        self._width = max(self._width, own.num_rows)
        row[:2] = own.a_RI.data_ptr(), own.num_rows
        for index, part in enumerate(own.parts):
            fields = part.b_PR.data_ptr(), part.first_row, part.rank, part.first_output, part.num_outputs
            row[2 + 5 * index :][:5] = fields

    def _add_(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        rows = self._rows.of(len(x_TI))
        if rows is not None and rows.native is not None and self._adapters:
            around = rows.native.rows_n, rows.native.slots_n, self._shared_table
            a_nR = torch.ops.raycore.lora_shrink.default(x_TI, *around, self._width)
            torch.ops.raycore.lora_expand.default(y_TO, self._ranks.all_reduce_(a_nR), *around)
        return y_TO


class Adapters:
    """The adapters that a worker holds, each in a slot, and the linear layers that they change."""

    def __init__(
        self, device: torch.device, num_slots: int, *, is_native: bool = False, batch_invariant: bool = False
    ) -> None:
        """`num_slots`: number of adapters that there may be. For the others, see `AdapterRows`."""
        self._num_slots = num_slots
        self.rows = AdapterRows(device, is_native=is_native, batch_invariant=batch_invariant)
        self._layers: dict[LinearKey, AdaptedLinear] = {}
        self._adapters: dict[int, ArrangedAdapter] = {}
        """By slot."""

    def around(self, linear: Linear, key: LinearKey, ranks: TensorParallel | None = None) -> Linear:
        """Return a linear layer with what adapters add to it. For `ranks`, see `AdaptedLinear`."""
        if self.rows.is_native:
            made: AdaptedLinear = NativeAdaptedLinear(linear, self.rows, self._num_slots, ranks)
        else:
            made = TorchAdaptedLinear(linear, self.rows, ranks)
        self._layers[key] = made
        for slot, adapter in self._adapters.items():
            made.put(slot, adapter.linears.get(key))
        return made

    def arrange(self, adapter: LoraWeights) -> ArrangedAdapter:
        """Return an adapter as `put` takes it. Steps may be running."""
        linears: dict[LinearKey, LoraLinear] = {**adapter.named}
        for index, layer in enumerate(adapter.layers):
            linears |= {(index, name): own for name, own in layer.items()}
        if self.rows.is_native:
            return ArrangedAdapter({key: PackedLora.of(own) for key, own in linears.items()})
        return ArrangedAdapter(dict(linears))

    def put(self, slot: int, adapter: ArrangedAdapter) -> None:
        """Put an adapter in a slot, instead of the one that is there. No step may be running."""
        self._adapters[slot] = adapter
        for key, made in self._layers.items():
            made.put(slot, adapter.linears.get(key))

    def drop(self, slot: int) -> None:
        """Give up the memory of the adapter in a slot, if there is one. No step may be running."""
        self._adapters.pop(slot, None)
        for made in self._layers.values():
            made.put(slot, None)

    def leave_layers(self) -> None:
        """Forget the layers, which will be made again, so that their memory can be freed. Adapters stay."""
        self._layers.clear()
