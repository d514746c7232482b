"""Rows in fp8 have the numbers of the formula, and the errors that the format has."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import strategies
from interpreted_triton import DEVICE
from native_kernels import randn

from raycore.kernels.gpu import fp8
from raycore.weights.fp8_weight import FP8, quantize_rows

DTYPES = strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SETTINGS = hypothesis.settings(max_examples=25)


def is_rounded(values: torch.Tensor, scales: torch.Tensor, x_TI: torch.Tensor) -> torch.Tensor:
    """Whether each error is at most half of the distance between two numbers of the format."""
    errors = (values.double() * scales.double() - x_TI.double()).abs()
    return errors <= torch.maximum(x_TI.double().abs() / 16, scales.double() / 1024) * (1 + 1e-6)


@SETTINGS
@hypothesis.given(
    dtype=DTYPES,
    seed=strategies.integers(0, 1 << 32),
    num_rows=strategies.integers(0, 4),
    dim=strategies.integers(1, 300) | strategies.just(1500),
    is_slice=strategies.booleans(),
)
def test_rows_are_quantized_to_fp8_by_the_formula(
    dtype: torch.dtype, seed: int, num_rows: int, dim: int, is_slice: bool
) -> None:
    x = (randn(seed, num_rows, 2 * dim) * 3).to(dtype)
    x_TI = x[:, :dim] if is_slice else x[:, :dim].contiguous()
    values, scales = (
        each.cpu() for each in fp8.quantize_rows(x_TI.to(DEVICE) if not is_slice else x.to(DEVICE)[:, :dim])
    )
    _, expected_scales = quantize_rows(x_TI)
    assert (values.dtype, values.shape) == (FP8, x_TI.shape)
    assert (scales.dtype, scales.shape) == (torch.float32, (num_rows, 1))
    torch.testing.assert_close(scales, expected_scales, rtol=1e-6, atol=0)
    # whatever is in the middle of two numbers may be rounded either way
    assert is_rounded(values, scales, x_TI).all()


@pytest.mark.parametrize("quantize", [fp8.quantize_rows, quantize_rows], ids=["triton", "torch"])
def test_rows_of_zeros_are_quantized_to_zeros(quantize) -> None:
    values, scales = quantize(torch.zeros(2, 40, device=DEVICE))
    assert not values.float().any()
    assert scales.isfinite().all()
    assert (scales > 0).all()


@pytest.mark.parametrize("quantize", [fp8.quantize_rows, quantize_rows], ids=["triton", "torch"])
def test_the_largest_number_of_a_row_is_kept_exactly_in_fp8(quantize) -> None:
    x_TI = torch.tensor([[-3.0, 1.0, 0.5], [1e-3, 2e-5, 0.0], [1e30, -1.0, 0.0]], device=DEVICE)
    values, scales = quantize(x_TI)
    assert values.float().abs().amax(dim=1).tolist() == [448.0] * 3
    torch.testing.assert_close((values.float() * scales)[:, 0], x_TI[:, 0], rtol=1e-6, atol=0)


def test_errors_of_fp8_quantization_are_at_most_those_of_the_format() -> None:
    x_TI = randn(1, 64, 500)
    assert is_rounded(*quantize_rows(x_TI), x_TI).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_fp8_rows_with_infinity_or_nan_are_stored_with_nan() -> None:
    values, _ = quantize_rows(torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0]]))
    assert values.float().isnan().any(dim=1).all()
    if DEVICE.type == "cuda":
        values, _ = fp8.quantize_rows(torch.tensor([[float("inf"), 1.0], [float("nan"), 1.0]], device=DEVICE))
        assert values.float().isnan().any(dim=1).all()
