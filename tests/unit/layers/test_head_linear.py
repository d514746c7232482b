"""Each head of a token gets its own linear layer, in every implementation, between strided tensors."""

from __future__ import annotations

import interpreted_triton  # noqa: F401  # before whatever imports Triton
import pytest
import torch
from native_kernels import assert_near, randn
from small_model import make_operations

from raycore.kernels import library as kernels

HAS_KERNELS = kernels.load() is not None
BACKENDS = ["torch", "triton", *["native"] * HAS_KERNELS]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 3, 8, 20), (7, 16, 128, 64), (33, 4, 130, 100), (300, 2, 64, 48)]
"""Rows, heads, inputs, outputs."""


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same numbers, with others between heads, before the first one and after the last one."""
    around = torch.full((len(x), x.shape[1] + 2, x.shape[2] + 6), torch.nan, dtype=x.dtype)
    around[:, 1:-1, 2 : 2 + x.shape[2]] = x
    return around[:, 1:-1, 2 : 2 + x.shape[2]]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_head_is_multiplied_with_its_weight(shape, backend, dtype, batch_invariant):
    num_rows, num_heads, num_inputs, num_outputs = shape
    if backend == "triton" and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies wrongly in bfloat16")
    if backend == "triton" and num_rows > 50:
        pytest.skip("takes the interpreter long")
    operations = make_operations(backend, batch_invariant=batch_invariant)
    weight_NOI = randn(1, num_heads, num_outputs, num_inputs).to(dtype)
    linear = operations.head_linear(weight_NOI)
    x_TNI, out_TNO = strided(randn(2, num_rows, num_heads, num_inputs).to(dtype)), randn(3, *shape[:2], num_outputs)
    out_TNO = strided(out_TNO.to(dtype))
    on_device = out_TNO.to(operations.device)
    linear(x_TNI.to(operations.device), on_device)
    out_TNO.copy_(on_device)
    expected = torch.einsum("tni,noi->tno", x_TNI.double(), weight_NOI.double())
    sizes = torch.einsum("tni,noi->tno", x_TNI.double().abs(), weight_NOI.double().abs())
    assert_near(out_TNO, expected, sizes)
    assert torch.equal(linear.weight.cpu(), weight_NOI)
    around = out_TNO.as_strided((len(x_TNI), num_heads + 2, num_outputs + 6), out_TNO.stride(), 0)
    assert around[:, [0, -1]].isnan().all(), "numbers around have changed"
    assert around[:, 1:-1, [0, 1, -4, -3, -2, -1]].isnan().all(), "numbers around have changed"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", ["torch", *["native"] * HAS_KERNELS])
def test_a_rows_bits_depend_on_no_other_row(backend, dtype):
    linear = make_operations(backend, batch_invariant=True).head_linear(randn(1, 3, 72, 128).to(dtype))
    x_TNI = randn(2, 260, 3, 128).to(dtype)
    whole, part, alone = (torch.empty(num_rows, 3, 72, dtype=dtype) for num_rows in (260, 19, 1))
    linear(x_TNI, whole)
    linear(x_TNI[100:119], part)
    linear(x_TNI[107:108], alone)
    assert torch.equal(whole[100:119], part)
    assert torch.equal(part[7:8], alone)


@pytest.mark.skipif(not HAS_KERNELS, reason="needs native kernels")
def test_weights_are_kept_in_as_few_bits_as_their_numbers_need():
    short = randn(1, 4, 40, 64).bfloat16().float()
    linear, exact = (
        make_operations("native").head_linear(each) for each in (short, short + 1e-6 * randn(2, 4, 40, 64))
    )
    assert linear._packed_NOI.dtype == torch.bfloat16
    assert exact._packed_NOI.dtype == torch.float32
