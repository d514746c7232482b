"""Norms and gates against their formulas in float64: Triton's kernels, those for CPUs, and plain torch."""

from __future__ import annotations

import math
from typing import Protocol

import hypothesis
import pytest
import torch
from hypothesis import strategies
from interpreted_triton import DEVICE
from native_kernels import GATES, assert_near, needs_kernels, randn

from raycore.kernels import library
from raycore.kernels.gates import native_gate_arguments
from raycore.kernels.gpu import rows
from raycore.layers.gate import gate_and_mul
from raycore.layers.norm import RMSNorm
from raycore.models.spec import Gate

EPS = 1e-6
DTYPES = strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = strategies.integers(0, 1 << 32)
SETTINGS = hypothesis.settings(max_examples=25)
NUM_ROWS, DIMS = strategies.integers(0, 5), strategies.integers(1, 300) | strategies.just(1500)


class Rows(Protocol):
    def rms_norm(self, x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float) -> torch.Tensor: ...

    def gate_and_mul(self, gate: Gate, gate_up_TF: torch.Tensor) -> torch.Tensor: ...


class TritonRows:
    device, num_roundings = DEVICE, 1
    rms_norm, gate_and_mul = staticmethod(rows.rms_norm), staticmethod(rows.gate_and_mul)


class NativeRows:
    device, num_roundings = "cpu", 1

    def rms_norm(self, x, weight_D, eps, offset):
        return torch.ops.raycore.rms_norm(x, weight_D, eps, offset)

    def gate_and_mul(self, gate, gate_up_TF):
        return torch.ops.raycore.gate_and_mul(gate_up_TF, *native_gate_arguments(gate))


class TorchRows:
    device, num_roundings = DEVICE, 2
    gate_and_mul = staticmethod(gate_and_mul)

    def rms_norm(self, x, weight_D, eps, offset):
        return RMSNorm(weight_D, eps, offset=offset)(x)


library.load()
IMPLEMENTATIONS = pytest.mark.parametrize(
    "kernels",
    [TritonRows(), pytest.param(NativeRows(), marks=needs_kernels), TorchRows()],
    ids=lambda k: type(k).__name__,
)


def near(found: torch.Tensor, expected: torch.Tensor, kernels=TritonRows, size: torch.Tensor | float = 0.0) -> None:
    """Where a result is rounded twice, small products of rounded numbers are farther off.

    `size`: of the numbers that are added up and rounded, if the result may be smaller.
    """
    slack = kernels.num_roundings
    if DEVICE.type == "cpu" and found.dtype == torch.bfloat16:
        slack = 2  # the interpreter doesn't round to the nearest number, but cuts digits off
    assert_near(found.cpu(), expected.cpu(), slack * (expected.cpu().abs() + size) + (slack - 1) * 1e-2)


def norm(x: torch.Tensor, weight_D: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
    return x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt() * (offset + weight_D.double())


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@IMPLEMENTATIONS
@SETTINGS
@hypothesis.given(
    dtype=DTYPES, seed=SEEDS, num_rows=NUM_ROWS, dim=DIMS, is_slice=..., offset=strategies.sampled_from([0.0, 1.0])
)
def test_rms_norm_equals_the_formula(
    kernels, dtype: torch.dtype, seed: int, num_rows: int, dim: int, is_slice: bool, offset: float
) -> None:
    x, weight_D = (randn(seed, num_rows, 2 * dim) * 3).to(dtype), randn(seed + 1, dim).to(dtype)
    found = x.to(kernels.device)[:, :dim]
    found = kernels.rms_norm(found if is_slice else found.contiguous(), weight_D.to(kernels.device), EPS, offset)
    assert found.dtype == dtype
    near(found, norm(x[:, :dim], weight_D, offset), kernels)


@SETTINGS
@hypothesis.given(
    dtype=DTYPES, seed=SEEDS, num_tokens=strategies.integers(0, 3), heads=strategies.integers(1, 4), is_one=...
)
def test_rms_norm_of_heads_equals_the_formula(
    dtype: torch.dtype, seed: int, num_tokens: int, heads: int, is_one: bool
) -> None:
    """The heads of queries are columns of a wider tensor. A norm may also have a single row."""
    qkv, weight_D = randn(seed, num_tokens, (heads + 2) * 24).to(dtype), randn(seed + 1, 24).to(dtype)
    x = qkv.to(DEVICE)[:, : heads * 24].unflatten(1, (heads, 24))
    x = x[0, 0] if is_one and num_tokens else x
    near(rows.rms_norm(x, weight_D.to(DEVICE), EPS), norm(x.cpu(), weight_D))


@IMPLEMENTATIONS
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@SETTINGS
@hypothesis.given(gate=strategies.sampled_from(GATES), dtype=DTYPES, seed=SEEDS, num_rows=NUM_ROWS, dim=DIMS)
def test_gate_and_mul_equals_the_formula(
    kernels, gate: Gate, dtype: torch.dtype, seed: int, num_rows: int, dim: int
) -> None:
    x = (randn(seed, num_rows, 2 * dim) * 10).to(dtype)
    size = x[:, :dim].double().abs() * (x[:, dim:].double().abs() + 1)
    near(kernels.gate_and_mul(gate, x.to(kernels.device, copy=True)), gate_and_mul(gate, x.double()), kernels, size)


@IMPLEMENTATIONS
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
def test_silu_and_mul_of_the_largest_numbers_does_not_overflow(kernels) -> None:
    largest = torch.finfo(torch.float32).max
    x = torch.tensor([[-largest, -1e4, -100.0, 0.0, 88.5, 1e4, largest, math.inf]])
    found = kernels.gate_and_mul("silu", torch.cat([x, torch.ones_like(x)], 1).to(kernels.device))
    assert found.tolist() == [[0.0, 0.0, pytest.approx(0.0, abs=1e-30), 0.0, 88.5, 1e4, largest, math.inf]]


@IMPLEMENTATIONS
def test_rms_norm_and_silu_keep_nan(kernels) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.tensor([[math.nan, 1.0] * 20], dtype=dtype, device=kernels.device)
        assert kernels.rms_norm(x, torch.ones(40, dtype=dtype, device=kernels.device), EPS, 0.0).isnan().all()
        assert kernels.gate_and_mul("silu", x).isnan().tolist()[0] == [True, False] * 10


@hypothesis.settings(max_examples=8)
@hypothesis.given(dtype=DTYPES, seed=SEEDS, dim=strategies.integers(1, 40).map(lambda n: 8 * n))
def test_row_kernels_give_a_row_the_same_bits_in_any_batch(dtype: torch.dtype, seed: int, dim: int) -> None:
    x, weight_D = randn(seed, 4, 2 * dim).to(dtype).to(DEVICE), randn(seed + 1, dim).to(dtype).to(DEVICE)
    calls = (
        lambda x_T2D: rows.rms_norm(x_T2D[:, :dim], weight_D, EPS),
        lambda x_T2D: rows.gate_and_mul("gelu", x_T2D),
    )
    for call in calls:
        together = call(x)
        assert same_bits(call(x.flip(0)).flip(0), together)
        assert all(same_bits(call(x[row : row + 1].clone()), together[row : row + 1]) for row in range(4))
