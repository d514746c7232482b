"""What LoRA adapters add to the outputs of linear layers, for the rows of the requests that use them.

An adapter adds `B (A x)` to the output of a layer for the input x, where A has few rows. Layers that are fused have an
A and a B for each of their parts. Shape suffixes: T rows of the step, I inputs of a layer, O its outputs, R rows of all
its A's, n rows that are for adapters, P outputs of a part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycore.checkpoint.model_spec import ModelSpec
from raycore.checkpoint.rank_rows import RankRows
from raycore.messages import NO_ADAPTER
from raycore.model.layers import AroundLinear, Linear, TensorParallel
from raycore.model.weights.lora_weights import LoraLinear, LoraWeights

Ints = NDArray[np.int64]

FusedName = Literal["qkv", "o", "gate_up", "down"]
"""A linear layer of a decoder layer, as this engine fuses them."""

_MANY_ROWS = 32
"""From so many rows of an adapter on, torch multiplies: the native kernels read weights once for every four rows."""
_MAX_PARTS = 3


@dataclass(frozen=True)
class _Group:
    """Rows that are for one adapter."""

    place: int
    rows: Tensor | None
    """int64. None: all."""


@dataclass(frozen=True)
class _FewRows:
    """Rows that are for several adapters. Those of the same adapter are adjacent."""

    rows_n: Tensor
    places_n: Tensor
    is_every: bool
    """Whether these are all rows, in order."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a layer's input that are for adapters: those for the native kernels, and those for torch."""

    few: _FewRows | None
    groups: list[_Group]


_NO_ROWS = _Rows(None, [])


def can_be_native(spec: ModelSpec, tp_size: int) -> bool:
    """Whether the native kernels can compute adapters of this model. They read inputs in pairs."""
    rows = RankRows.of(spec, 0, tp_size)
    return not any(size % 2 for size in (spec.hidden_size, rows.q.num, rows.gate.num))


class AdapterRows:
    """Which rows of the current step are for which adapter. All layers of a worker look here."""

    def __init__(self, device: torch.device, *, is_native: bool = False, batch_invariant: bool = False) -> None:
        """
        Args:
            is_native: whether native kernels compute a few rows of an adapter.
            batch_invariant: let a row's bits not depend on other rows.
        """
        self._device = device
        self.is_native = is_native
        self._batch_invariant = batch_invariant
        self._all = self._sampled = _NO_ROWS
        self._num_rows = 0

    @property
    def is_empty(self) -> bool:
        """Whether no row of the step is for an adapter."""
        return self._all is _NO_ROWS

    def begin_step(self, places_T: Ints, sampled_rows: Ints) -> None:
        """Take the step's rows.

        Args:
            places_T: for each row, the adapter's place, or `NO_ADAPTER`.
            sampled_rows: the rows that the last layer keeps.
        """
        self._all = self._sampled = _NO_ROWS
        if (places_T != NO_ADAPTER).any():
            self._num_rows = len(places_T)
            self._all = self._rows_of(places_T)
            self._sampled = self._rows_of(places_T[sampled_rows])

    def of(self, num_rows: int) -> _Rows:
        """Return the rows of a layer's input that has so many rows: all of the step's, or those that are sampled."""
        # if there are as many of both, they are the same
        return self._all if num_rows >= self._num_rows else self._sampled

    def _rows_of(self, places: Ints) -> _Rows:
        own = np.flatnonzero(places != NO_ADAPTER)
        rows = own[np.argsort(places[own], kind="stable")]
        found, firsts, counts = np.unique(places[rows], return_index=True, return_counts=True)
        is_many = counts >= (1 << 62 if self._batch_invariant else _MANY_ROWS)
        is_few = ~is_many if self.is_native else np.zeros_like(is_many)
        few_rows = rows[np.repeat(is_few, counts)]
        few = None
        if len(few_rows):
            is_every = np.array_equal(few_rows, np.arange(len(places)))
            few = _FewRows(self._tensor(few_rows), self._tensor(places[few_rows]), is_every)
        groups: list[_Group] = []
        for place, first, count in zip(found[~is_few].tolist(), firsts[~is_few], counts[~is_few], strict=True):
            of_adapter = rows[first : first + count]
            if self._batch_invariant:
                groups += [_Group(place, self._tensor(row)) for row in of_adapter[:, None]]
            else:
                groups.append(_Group(place, None if count == len(places) else self._tensor(of_adapter)))
        return _Rows(few, groups)

    def _tensor(self, rows: Ints) -> Tensor:
        return torch.as_tensor(rows).to(self._device)


class AdaptedLinear(AroundLinear):
    """A linear layer, and what adapters add to it."""

    def __init__(self, linear: Linear, rows: AdapterRows, num_places: int, ranks: TensorParallel | None = None) -> None:
        """
        Args:
            num_places: number of adapters that there may be.
            ranks: the ranks over which the layer's input is split. None: each of them has all of it.
        """
        super().__init__(linear)
        self._rows = rows
        self._ranks = ranks or TensorParallel()
        self._adapters: dict[int, LoraLinear] = {}
        self._width = 1
        """The largest number of rows of an adapter's A."""
        self._table = np.zeros((num_places, 2 + 5 * _MAX_PARTS), np.int64)
        """[places, 17]: the adapters, as the native kernels read them."""
        self._shared_table = torch.as_tensor(self._table)
        """The same memory."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        y_TO = self._linear(x_TI)
        return y_TO if self._rows.is_empty else self._add_(y_TO, x_TI)

    def add_to(self, residual_TO: Tensor, x_TI: Tensor) -> Tensor:
        y_TO = self._linear.add_to(residual_TO, x_TI)
        return y_TO if self._rows.is_empty else self._add_(y_TO, x_TI)

    def put(self, place: int, own: LoraLinear | None) -> None:
        """Put an adapter in a place, instead of the one that is there. None: the adapter there adds nothing."""
        self._adapters.pop(place, None)
        row = self._table[place]
        row[:] = 0
        if own is None:
            return
        self._adapters[place] = own
        self._width = max(self._width, len(own.a_RI))
        row[:2] = own.a_RI.data_ptr(), len(own.a_RI)
        for index, part in enumerate(own.parts):
            num_outputs = part.b_RO.shape[1]
            fields = part.b_RO.data_ptr(), part.first_row, part.rank, part.first_output, num_outputs
            row[2 + 5 * index :][:5] = fields

    def _add_(self, y_TO: Tensor, x_TI: Tensor) -> Tensor:
        rows = self._rows.of(len(x_TI))
        if rows.few is not None and self._adapters:
            self._add_few_(y_TO, x_TI, rows.few)
        for group in rows.groups:
            own = self._adapters.get(group.place)
            if own is not None:
                self._add_group_(y_TO, x_TI, group.rows, own)
        return y_TO

    def _add_few_(self, y_TO: Tensor, x_TI: Tensor, few: _FewRows) -> None:
        x_nI = x_TI if few.is_every else x_TI.index_select(0, few.rows_n)
        a_nR = torch.ops.raycore.lora_shrink.default(x_nI, few.places_n, self._shared_table, self._width)
        a_nR = self._ranks.all_reduce_(a_nR)
        torch.ops.raycore.lora_expand.default(y_TO, a_nR, few.rows_n, few.places_n, self._shared_table)

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


class Adapters:
    """The adapters that a worker holds, each in a place, and the linear layers that they change."""

    def __init__(
        self, device: torch.device, num_places: int, *, is_native: bool = False, batch_invariant: bool = False
    ) -> None:
        """`num_places`: number of adapters that there may be. For the others, see `AdapterRows`."""
        self._num_places = num_places
        self.rows = AdapterRows(device, is_native=is_native, batch_invariant=batch_invariant)
        self._layers: dict[tuple[int, FusedName], AdaptedLinear] = {}
        self._held: dict[int, LoraWeights] = {}
        """By place."""

    def around(self, linear: Linear, layer: int, name: FusedName, ranks: TensorParallel | None = None) -> Linear:
        """Return a linear layer of a decoder layer with what adapters add to it.

        Args:
            layer: the index of the decoder layer among those of the stage.
            ranks: see `AdaptedLinear`.
        """
        made = self._layers[layer, name] = AdaptedLinear(linear, self.rows, self._num_places, ranks)
        for place, adapter in self._held.items():
            made.put(place, getattr(adapter.layers[layer], name))
        return made

    def hold(self, place: int, adapter: LoraWeights) -> None:
        """Put an adapter in a place, instead of the one that is there. No step may be running."""
        self._held[place] = adapter
        for (layer, name), made in self._layers.items():
            made.put(place, getattr(adapter.layers[layer], name))

    def drop(self, place: int) -> None:
        """Give up the memory of the adapter in a place, if there is one. No step may be running."""
        self._held.pop(place, None)
        for made in self._layers.values():
            made.put(place, None)

    def leave_layers(self) -> None:
        """Forget the layers, which will be made again, so that their memory can be freed. Adapters stay."""
        self._layers.clear()
