"""Linear layers with weights in fp8: the native kernels against those with the same numbers in float32, bit by bit,
with every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies
from kernel_bits import INSTRUCTION_SETS
from native_kernels import GATES, assert_near, emulated_ops, needs_kernels, randn, size_of_gated

from raycore.kernels import library
from raycore.layers.gate import gate_and_mul
from raycore.layers.integer_linear import GatedIntegerLinear, IntegerLinear
from raycore.models.spec import Gate
from raycore.weights.integer_weight import IntegerWeight

pytestmark = [needs_kernels, pytest.mark.timeout(400)]
"""Emulation is slow."""

INTS = strategies.integers
DTYPES = strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16])
GROUPS = strategies.sampled_from([None, 16, 20, 32, 128, 200])
ROWS = strategies.one_of(INTS(0, 8), strategies.sampled_from([18, 19, 24, 97, 130]))
"""Both ways of few and of many rows, and several tasks of rows."""
CPU = torch.device("cpu")


@pytest.fixture(
    autouse=True,
    params=[*INSTRUCTION_SETS, "neon, emulated"],
    scope="module",
)
def _instruction_set(request: pytest.FixtureRequest) -> Iterator[None]:
    before = library.load()
    assert before is not None
    if request.param == "neon, emulated":
        ops = emulated_ops()
        with pytest.MonkeyPatch.context() as patch:
            for name in ("integer_linear", "gated_integer_linear", "add_integer_linear", "panel_linear"):
                patch.setattr(torch.ops.raycore, name, SimpleNamespace(default=getattr(ops, name)))
            yield
        return
    if library.choose(request.param) is None:
        pytest.skip("this processor hasn't got it")
    yield
    library.choose(before)


def weight_of(values_OI: torch.Tensor, group_size: int | None = None, seed: int = 0) -> IntegerWeight:
    """A weight with these numbers in 8 bits, and random scales."""
    num_outputs, num_inputs = values_OI.shape
    weight = IntegerWeight.empty(num_outputs, num_inputs, 8, group_size or num_inputs, 16, CPU, "e4m3")
    weight.words_OW.copy_(values_OI.contiguous().view(torch.uint8).view(torch.int32))
    weight.scales_OG.uniform_(0.001, 0.01, generator=torch.Generator().manual_seed(seed))
    return weight


@strategies.composite
def weights(draw: strategies.DrawFn, num_outputs: int | None = None) -> IntegerWeight:
    shape = num_outputs or draw(INTS(1, 100)), 4 * draw(INTS(1, 330))
    seed = draw(INTS(0, 1 << 32))
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    bits[bits & 127 == 127] = 0  # NaN
    return weight_of(bits.view(torch.float8_e4m3fn), draw(GROUPS), seed)


def sums_in_float32(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """What the kernel for float32 computes with the same numbers."""
    packed = torch.ops.raycore.pack_linear.default(weight.dequantize(torch.float32))
    return torch.ops.raycore.panel_linear.default(x.float().contiguous(), packed, torch.empty(0), weight.shape[0])


@hypothesis.settings(max_examples=40)
@hypothesis.given(DTYPES, INTS(0, 1 << 32), ROWS, weights(), strategies.booleans())
def test_results_have_the_bits_of_the_same_numbers_in_float32(
    dtype: torch.dtype, seed: int, num_rows: int, weight: IntegerWeight, is_slice: bool
) -> None:
    num_outputs, num_inputs = weight.shape
    x = randn(seed, num_rows, num_inputs).to(dtype)
    x = torch.cat([x, x], dim=1)[:, :num_inputs] if is_slice else x
    linear, expected = IntegerLinear(weight, None), sums_in_float32(x, weight)
    assert torch.equal(linear(x), expected.to(dtype))
    residual, bias = randn(seed + 1, num_rows, num_outputs).to(dtype), randn(seed + 2, num_outputs).to(dtype)
    with_bias = IntegerLinear(weight, bias)
    added = (expected + bias.float()) + residual.float()
    assert torch.equal(with_bias.add_to(residual.clone(), x), added.to(dtype))
    assert torch.equal(linear.weight.dequantize(torch.float64), weight.dequantize(torch.float64))
    if num_rows:
        assert torch.equal(linear(x[-1:]), linear(x)[-1:]), "a row's result depends on that row alone"


@hypothesis.settings(max_examples=20)
@hypothesis.given(
    DTYPES, INTS(0, 1 << 32), ROWS, weights(num_outputs=96), strategies.booleans(), strategies.sampled_from(GATES)
)
def test_gates_are_computed_of_the_same_sums(
    dtype: torch.dtype, seed: int, num_rows: int, weight: IntegerWeight, has_bias: bool, gate: Gate
) -> None:
    x = (randn(seed, num_rows, weight.shape[1]) / 100).to(dtype)
    bias = randn(seed + 1, 96).to(dtype) if has_bias else None
    gated, numbers_OI = GatedIntegerLinear(weight, bias, gate), weight.dequantize(torch.float64)
    sums = x.double() @ numbers_OI.t() + (0 if bias is None else bias.double())
    size = (x.double().abs() @ numbers_OI.abs().t() + (0 if bias is None else bias.double().abs())).chunk(2, dim=1)
    assert_near(gated(x), gate_and_mul(gate, sums), size_of_gated(gate, *size))
    assert torch.equal(gated.weight.dequantize(torch.float64), numbers_OI)


def test_every_number_is_read() -> None:
    """Each is alone in a row of the weight, so that the results are the numbers themselves."""
    bits = torch.arange(256, dtype=torch.uint8)
    bits[[127, 255]] = 0  # NaN
    numbers = bits.view(torch.float8_e4m3fn)
    weight = weight_of(torch.zeros(256, 8).to(torch.float8_e4m3fn))
    weight.words_OW.view(torch.uint8)[:, 5] = bits
    weight.scales_OG.fill_(1)
    for num_rows in (1, 20):
        found = IntegerLinear(weight, None)(torch.eye(8)[5].repeat(num_rows, 1))
        assert torch.equal(found, numbers.float().repeat(num_rows, 1))


def test_scales_may_be_far_from_one() -> None:
    for scale in (2.0**-130, 2.0**-100, 2.0**100):
        weight = weight_of(torch.full((16, 8), 1.75).to(torch.float8_e4m3fn))
        weight.scales_OG.fill_(scale)
        found = IntegerLinear(weight, None)(torch.eye(8)[:1])
        assert found.tolist() == [[torch.tensor(1.75).mul(scale).item()] * 16]


@pytest.mark.parametrize(
    ("num_inputs", "group_size", "words"),
    [(0, 4, "a packed weight with a multiple of 4 inputs"), (6, 4, "multiple of 4 inputs"), (8, 6, "groups of")],
)
def test_sizes_that_kernels_do_not_know_are_refused(num_inputs: int, group_size: int, words: str) -> None:
    nothing, packed = torch.zeros(0), torch.zeros(16, num_inputs, dtype=torch.uint8)
    scales = torch.zeros(1, max(1, -(-num_inputs // group_size)), 16)
    with pytest.raises(RuntimeError, match=f"raycore's kernels expect .*{words}"):
        torch.ops.raycore.integer_linear(
            torch.zeros(2, num_inputs), packed, scales, nothing, nothing, 8, 16, 0, group_size, False, 16
        )
