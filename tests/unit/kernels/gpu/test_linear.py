"""The batch-invariant linear layer against its formula in float64."""

from __future__ import annotations

import hypothesis
import torch
from hypothesis import strategies
from interpreted_triton import DEVICE, DTYPES
from native_kernels import ROUNDING, assert_near, randn

from raycore.kernels.gpu.linear import batch_invariant_linear

SEEDS = strategies.integers(0, 1 << 32)
SETTINGS = hypothesis.settings(max_examples=25)


@SETTINGS
@hypothesis.given(
    dtype=strategies.sampled_from(DTYPES),
    seed=SEEDS,
    num_rows=strategies.integers(0, 4) | strategies.sampled_from([64, 65, 130]),
    num_inputs=strategies.integers(1, 150),
    num_outputs=strategies.integers(1, 150),
    is_slice=strategies.booleans(),
)
def test_batch_invariant_linear_equals_the_formula(
    dtype, seed: int, num_rows: int, num_inputs: int, num_outputs: int, is_slice: bool
) -> None:
    x_TI = randn(seed, num_rows, 2 * num_inputs).to(dtype).to(DEVICE)[:, :num_inputs]
    x_TI = x_TI if is_slice else x_TI.contiguous()
    weight_OI, bias_O = (randn(seed + 1, num_outputs, n).to(dtype).to(DEVICE) for n in (num_inputs, 1))
    bias_O, residual_TO = bias_O[:, 0].contiguous(), randn(seed + 2, num_rows, num_outputs).to(dtype).to(DEVICE)
    product_TO = x_TI.double() @ weight_OI.double().t()
    size_TO = x_TI.double().abs() @ weight_OI.double().abs().t() + bias_O.abs() + residual_TO.abs()

    def check(found_TO: torch.Tensor, expected_TO: torch.Tensor) -> None:
        assert found_TO.dtype == dtype
        scale_TO = expected_TO.abs() + size_TO * (ROUNDING[torch.float32] / ROUNDING[dtype])
        assert_near(found_TO.cpu(), expected_TO.cpu(), scale_TO.cpu())

    check(batch_invariant_linear(x_TI, weight_OI), product_TO)
    check(batch_invariant_linear(x_TI, weight_OI, bias_O), product_TO + bias_O.double())
    expected_TO = product_TO + residual_TO.double()
    sum_TO = residual_TO.clone()
    assert batch_invariant_linear(x_TI, weight_OI, None, sum_TO) is sum_TO
    check(sum_TO, expected_TO)
    sum_TO = residual_TO.clone()
    batch_invariant_linear(x_TI, weight_OI, bias_O, sum_TO)
    check(sum_TO, expected_TO + bias_O.double())


@hypothesis.settings(max_examples=5)
@hypothesis.given(
    dtype=strategies.sampled_from(DTYPES), seed=SEEDS, num_others=strategies.sampled_from([0, 1, 15, 63, 64, 70])
)
def test_batch_invariant_linear_gives_a_row_the_same_bits_in_any_batch(
    dtype: torch.dtype, seed: int, num_others: int
) -> None:
    own_2I, others_TI = randn(seed, 2, 200).to(dtype).to(DEVICE), randn(seed + 1, num_others, 200).to(dtype).to(DEVICE)
    weight_OI, bias_O = randn(seed + 2, 72, 200).to(dtype).to(DEVICE), randn(seed + 3, 72).to(dtype).to(DEVICE)
    alone_2O = torch.cat([batch_invariant_linear(own_2I[i : i + 1], weight_OI, bias_O) for i in range(2)])
    first_TO = batch_invariant_linear(torch.cat([own_2I, others_TI]), weight_OI, bias_O)
    last_TO = batch_invariant_linear(torch.cat([others_TI, own_2I]), weight_OI, bias_O)
    assert torch.equal(first_TO[:2], alone_2O)
    assert torch.equal(last_TO[num_others:], alone_2O)


def test_batch_invariant_linear_takes_many_tiles_of_rows() -> None:
    """More tiles of rows than one band has."""
    x_TI, weight_OI = randn(0, 64 * 17 + 3, 4).to(DEVICE), randn(1, 130, 4).to(DEVICE)
    expected_TO = x_TI.double() @ weight_OI.double().t()
    assert_near(batch_invariant_linear(x_TI, weight_OI).cpu(), expected_TO.cpu(), 20.0)
