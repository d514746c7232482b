"""Weights that aren't put together yet: which rows of which tensors they consist of.

An update makes layers anew, and puts their numbers in the place of the old ones. With these weights, native kernels
pack the numbers of an update where the old ones are, with no copy in between. To all other code they are tensors, which
are made when it uses their numbers. Shape suffixes: O outputs of a layer, I its inputs, R some rows, P rows in panels.
"""

from __future__ import annotations

# torch's hooks for tensors are partially typed:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Unmade(Tensor):
    """A tensor on the CPU whose numbers are made when an operation of torch uses them."""

    __torch_function__: ClassVar[Any] = torch._C._disabled_torch_function_impl
    _made: Tensor | None

    @classmethod
    def of_shape(cls, num_rows: int, num_columns: int, dtype: torch.dtype) -> Any:
        """Return a tensor of this class."""
        with torch.inference_mode(False):  # else torch refuses views of it
            tensor = Tensor._make_wrapper_subclass(cls, (num_rows, num_columns), dtype=dtype)
        tensor._made = None
        return tensor

    def made(self) -> Tensor:
        """Return the usual tensor, always the same one."""
        if self._made is None:
            with torch.inference_mode(False):
                self._made = self._make()
        return self._made

    def copy_to(self, into: Tensor) -> None:
        """Give another tensor, of the same shape and dtype, these numbers."""
        into.copy_(self.made())

    def _make(self) -> Tensor:
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*tree_map(_usual, args), **tree_map(_usual, kwargs or {}))


class GatheredRows(Unmade):
    """The weight [O, I] of a linear layer: rows of other tensors."""

    _pieces: list[tuple[int, Tensor]]
    """Rows [R, I] in any dtype, and where they begin. Nobody may write to them."""
    _start: int
    order_O: Tensor
    """int64: for each row of the weight, its place in the order in which rows are put. Whoever reorders a weight's rows
    does it with these."""

    @classmethod
    def empty(cls, num_rows: int, num_inputs: int, dtype: torch.dtype) -> GatheredRows:
        """Return a weight whose rows `fill_rows` brings."""
        weight = cls.of_shape(num_rows, num_inputs, dtype)
        weight._pieces, weight._start, weight.order_O = [], 0, torch.arange(num_rows)
        return weight

    def part(self, rows: slice) -> GatheredRows:
        """Return what only takes these rows of the weight, by `fill_rows`."""
        start, stop, _ = rows.indices(len(self))
        part = GatheredRows.empty(stop - start, self.shape[1], self.dtype)
        part._pieces, part._start = self._pieces, self._start + start
        return part

    def fill_rows(self, rows_RI: Tensor) -> None:
        """Have the weight, or the part, consist of these rows. That comes before any use of the weight."""
        assert rows_RI.shape == self.shape
        self._pieces.append((self._start, rows_RI))

    def reordered(self, order_O: Tensor) -> GatheredRows:
        """Return the weight with its rows in another order. `order_O`: for each one, its place in this weight."""
        other = GatheredRows.empty(*self.shape, dtype=self.dtype)
        other._pieces, other.order_O = self._pieces, self.order_O[order_O]
        if self._made is not None:
            other._pieces, other.order_O = [(0, self._made)], order_O
        return other

    def pieces_in_panels(self, panel: int) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that the weight consists of, and which of their rows it has where, for packing.

        Returns: tensors [R, I] of the weight's dtype, with contiguous rows, and for each of them int64[P]: for each row
            of the weight, and those that fill its last panel of `panel` rows, the tensor's row, or -1. Each panel has
            rows of one tensor. If that isn't so, the weight is made first.
        """
        order_P = _filled(self.order_O, panel)
        found: list[tuple[Tensor, Tensor]] = []
        num_pieces = torch.zeros(len(order_P) // panel, dtype=torch.int64)
        for start, rows_RI in self._pieces:
            is_own_P = (order_P >= start) & (order_P < start + len(rows_RI))
            found.append((rows_RI, torch.where(is_own_P, order_P - start, -1)))
            num_pieces += is_own_P.view(-1, panel).any(1)
        fits = all(rows_RI.dtype == self.dtype and rows_RI.stride(1) == 1 for rows_RI, _ in found)
        if self._made is None and fits and bool((num_pieces == 1).all()):
            return found
        return [(self.made(), _filled(torch.arange(len(self)), panel))]

    def _make(self) -> Tensor:
        made_OI = torch.empty(self.shape, dtype=self.dtype)
        for start, rows_RI in self._pieces:
            made_OI[start : start + len(rows_RI)].copy_(rows_RI)
        return made_OI[self.order_O]


def _filled(order_O: Tensor, panel: int) -> Tensor:
    """Return the order with -1 for rows that fill the last panel."""
    return torch.nn.functional.pad(order_O, (0, -len(order_O) % panel), value=-1)


def _usual(value: Any) -> Any:
    return value.made() if isinstance(value, Unmade) else value
