"""The layers of `NativeOperations` beside those of `Operations`."""

from __future__ import annotations

import pytest
import torch
from native_kernels import needs_kernels, randn
from small_model import make_operations

pytestmark = needs_kernels

SIZES = [(96, 64), (48, 40), (24, 64)]
"""Outputs and inputs: some fit the tiles of AMX, some don't."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5, 40])
def test_native_layers_equal_those_of_plain_torch(
    dtype: torch.dtype, size: tuple[int, int], batch_invariant: bool, num_rows: int
) -> None:
    torch_operations, native = (
        make_operations(backend, batch_invariant=batch_invariant) for backend in ("torch", "native")
    )
    num_outputs, num_inputs = size
    weight, bias = randn(1, *size).to(dtype), randn(2, num_outputs).to(dtype)
    x, residual = randn(0, num_rows, num_inputs).to(dtype), randn(3, num_rows, num_outputs).to(dtype)
    for own_bias in (None, bias):
        expected, found = (each.linear(weight.clone(), own_bias) for each in (torch_operations, native))
        torch.testing.assert_close(found(x), expected(x), rtol=0.02, atol=0.05)
        sums = found.add_to(residual.clone(), x)
        torch.testing.assert_close(sums, expected.add_to(residual.clone(), x), rtol=0.02, atol=0.1)
        expected, found = (each.gated_linear(weight.clone(), own_bias) for each in (torch_operations, native))
        torch.testing.assert_close(found(x), expected(x), rtol=0.05, atol=0.3)
    for is_tied in (False, True):
        expected, found = (each.head(weight.clone(), is_tied=is_tied) for each in (torch_operations, native))
        torch.testing.assert_close(found(x), expected(x), rtol=0.02, atol=0.05)
