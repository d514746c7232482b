"""The native layer norms against their formula in float64, and beside plain torch."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from kernel_bits import INSTRUCTION_SETS
from native_kernels import assert_near, needs_kernels, randn
from torch import Tensor

from raycore.kernels import library
from raycore.layers.native_operations import NativeOperations
from raycore.layers.operations import Operations

pytestmark = needs_kernels
EPS = 1e-6
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(0, 8), (1, 1), (3, 5), (70, 33), (9, 300), (40, 768)], ids=str)
HAS_BIAS = pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])


@pytest.fixture(autouse=True, params=INSTRUCTION_SETS, scope="module")
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = library.load()
    assert before is not None
    if library.choose(request.param) is None:
        pytest.skip("this processor hasn't got it")
    yield
    library.choose(before)


def weights(dim: int, dtype: torch.dtype, *, has_bias: bool) -> tuple[Tensor, Tensor]:
    return randn(2, dim).to(dtype), randn(3, dim if has_bias else 0).to(dtype)


def formula(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centered = x - x.mean(-1, keepdim=True)
    y = centered / (centered.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    return y + bias.double() if len(bias) else y


@DTYPES
@SHAPES
@HAS_BIAS
def test_layer_norm_equals_the_formula(dtype: torch.dtype, shape: tuple[int, int], has_bias: bool) -> None:
    x, (weight, bias) = (randn(0, *shape) * 3 + 1).to(dtype), weights(shape[1], dtype, has_bias=has_bias)
    assert_near(torch.ops.raycore.layer_norm(x, weight, bias, EPS), formula(x.double(), weight, bias), 4.0)


@DTYPES
@SHAPES
@HAS_BIAS
@pytest.mark.parametrize("keeps_sum", [False, True], ids=["", "keeps the sum"])
def test_add_layer_norm_equals_the_formula_and_plain_torch(
    dtype: torch.dtype, shape: tuple[int, int], has_bias: bool, keeps_sum: bool
) -> None:
    # numbers of the stream that 16 bits don't have
    residual, x = randn(0, *shape) * 100 + 0.001, randn(1, *shape).to(dtype)
    weight, bias = weights(shape[1], dtype, has_bias=has_bias)
    total = residual + x
    normalized = formula(total.double(), weight, bias)
    own_bias = bias if has_bias else None
    for operations in (NativeOperations(), Operations(torch.device("cpu"))):
        norm = operations.add_layer_norm(weight, own_bias, EPS, keeps_sum=keeps_sum)
        stream, y = norm(residual.clone(), x.clone())
        assert (stream.dtype, y.dtype) == (torch.float32, dtype)
        assert_near(y, normalized, 4.0)
        if keeps_sum:
            assert torch.equal(stream, total)
        else:
            assert_near(stream, normalized, 4.0)


def test_rows_do_not_depend_on_other_rows_or_threads() -> None:
    residual, x = randn(0, 300, 50), randn(1, 300, 50).bfloat16()
    norm = NativeOperations().add_layer_norm(*weights(50, torch.bfloat16, has_bias=True), EPS, keeps_sum=False)
    together = norm(residual.clone(), x.clone())
    for row in (0, 299):
        alone = norm(residual[row : row + 1].clone(), x[row : row + 1].clone())
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("residual", torch.zeros(2, 6).bfloat16(), "a contiguous residual [T, D] in float32"),
        ("residual", torch.zeros(3, 6), "a contiguous residual [T, D] in float32"),
        ("x", torch.zeros(6, 2).t(), "a contiguous x [T, D]"),
        ("weight", torch.zeros(5), "a contiguous weight [D] of the dtype of x"),
        ("bias", torch.zeros(6).bfloat16(), "a contiguous bias [D] of the dtype of x"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(name: str, wrong: Tensor, expected: str) -> None:
    arguments = {
        "residual": torch.zeros(2, 6),
        "x": torch.zeros(2, 6),
        "weight": torch.zeros(6),
        "bias": torch.zeros(6),
    }
    with pytest.raises(RuntimeError, match=re.escape(f"raycore's kernels expect {expected}")):
        torch.ops.raycore.add_layer_norm(*(arguments | {name: wrong}).values(), EPS, False)
