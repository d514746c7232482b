"""Weights that are rows of other tensors: to torch they are tensors, and kernels pack them where they are needed."""

from __future__ import annotations

import pytest
import torch
from native_kernels import needs_kernels
from torch import Tensor

from raycore.kernels import library
from raycore.layers.native_operations import _PackedRows
from raycore.layers.panels import one_after_the_other, side_by_side
from raycore.weights.gathered import GatheredRows

SIZES = [32, 48, 16]


def gathered(dtype: torch.dtype, sizes: list[int], num_inputs: int = 34) -> tuple[GatheredRows, Tensor]:
    """A weight in `dtype`, whose last rows are columns of a wider tensor, and the same weight as a usual tensor."""
    pieces = [torch.randn(size, num_inputs).to(dtype) for size in sizes]
    wide = torch.zeros(sizes[-1], num_inputs + 5).to(dtype)
    wide[:, 3:-2] = pieces[-1]
    weight, start = GatheredRows.empty(sum(sizes), num_inputs, dtype), 0
    for piece in [*pieces[:-1], wide[:, 3:-2]]:
        weight.part(slice(start, start + len(piece))).fill_rows(piece)
        start += len(piece)
    return weight, torch.cat(pieces)


def test_torch_computes_with_the_numbers() -> None:
    weight, expected = gathered(torch.float32, SIZES)
    assert weight.shape == expected.shape
    assert weight.dtype == expected.dtype
    assert torch.equal(weight * 2, expected * 2)
    with torch.inference_mode():
        assert torch.equal(torch.cat([*weight.chunk(2, 1)], 1), expected)
        weight, expected = gathered(torch.float32, SIZES)
        assert torch.equal(torch.cat([*weight.chunk(2, 1)], 1), expected)
    weight[3] = 0
    assert not weight[3].any()
    assert torch.equal(weight[4:], expected[4:])


def test_rows_are_reordered_before_and_after_the_numbers_are_made() -> None:
    weight, expected = gathered(torch.bfloat16, SIZES)
    order = torch.randperm(len(weight))
    for _ in range(2):
        assert torch.equal(weight.reordered(order).made(), expected[order])
        assert torch.equal(weight.reordered(order).reordered(order).made(), expected[order][order])
        assert torch.equal(one_after_the_other(side_by_side(weight).made()), expected)
        weight.made()
    weight.made()[0] = 1
    assert torch.equal(weight.reordered(order).made(), weight.made()[order]), "changed numbers count"


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("sizes", "num_inputs"), [(SIZES, 34), (SIZES, 96), ([37], 64), ([32, 5], 36), ([20, 28], 64), ([16], 2)]
)
def test_rows_are_packed_as_the_whole_weight_is(dtype: torch.dtype, sizes: list[int], num_inputs: int) -> None:
    library.load()
    weight, expected = gathered(dtype, sizes, num_inputs)
    within = torch.cat([panel[torch.randperm(len(panel))] for panel in torch.arange(len(weight)).split(16)])
    for order in (torch.arange(len(weight)), within, torch.randperm(len(weight))):
        packed = _PackedRows.of(weight.reordered(order))
        into = torch.full(packed.shape, 7.0, dtype=dtype)
        packed.copy_to(into)
        assert torch.equal(into, torch.ops.raycore.pack_linear(expected[order]))
        assert torch.equal(packed.made(), into)


@needs_kernels
def test_rows_of_another_dtype_are_converted() -> None:
    library.load()
    numbers = torch.randn(48, 34)
    weight = GatheredRows.empty(48, 34, torch.bfloat16)
    weight.fill_rows(numbers)
    into = torch.zeros(48, 34, dtype=torch.bfloat16)
    _PackedRows.of(weight).copy_to(into)
    assert torch.equal(into, torch.ops.raycore.pack_linear(numbers.bfloat16()))


@needs_kernels
def test_rows_that_the_weight_lacks_are_refused() -> None:
    library.load()
    packed, weight = torch.zeros(16, 4), torch.zeros(3, 4)
    with pytest.raises(RuntimeError, match="rows that the weight has"):
        torch.ops.raycore.pack_rows(packed, weight, torch.full((16,), 3))
    with pytest.raises(RuntimeError, match="one for each row"):
        torch.ops.raycore.pack_rows(packed, weight, torch.zeros(3, dtype=torch.int64))
