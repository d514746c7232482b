"""Linear layers with weights in integers: the native kernels against their formula, with every instruction set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies
from kernel_bits import INSTRUCTION_SETS
from native_kernels import GATES, assert_near, emulated_ops, needs_kernels, randn, size_of_gated

from raycore.kernels import library
from raycore.layers.gate import gate_and_mul
from raycore.layers.integer_linear import GatedIntegerLinear, IntegerEmbedding, IntegerLinear
from raycore.models.spec import Gate
from raycore.weights.integer_weight import IntegerWeight

pytestmark = [needs_kernels, pytest.mark.timeout(400)]
"""Emulation is slow."""

INTS = strategies.integers
DTYPES = strategies.sampled_from([torch.float32, torch.bfloat16, torch.float16])
GROUPS = strategies.sampled_from([None, 16, 32, 64, 128, 256, 512])
ANY_GATE = strategies.sampled_from(GATES)
LARGEST = {8: 127, 16: 32639}


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
            for name in ("integer_linear", "gated_integer_linear", "add_integer_linear"):
                patch.setattr(torch.ops.raycore, name, SimpleNamespace(default=getattr(ops, name)))
            yield
        return
    if library.choose(request.param) is None:
        pytest.skip("this processor hasn't got it")
    yield
    library.choose(before)


@strategies.composite
def weights(draw: strategies.DrawFn, num_outputs: int | None = None, *, is_embedding: bool = False) -> IntegerWeight:
    bits = draw(strategies.sampled_from([4, 8]))
    has_all = bits == 4 and not is_embedding
    code = draw(strategies.sampled_from(["integer", "affine", "e2m1"] if has_all else ["integer", "affine"]))
    num_inputs = draw(INTS(1, 130)) * 32 // bits
    group_size = draw(GROUPS) or num_inputs
    num_inputs += -num_inputs % group_size if is_embedding else 0
    shape = num_outputs or draw(INTS(1, 100)), num_inputs
    row_bits, row_groups = draw(strategies.sampled_from([(8, 0), (8, 16), (8, 32), (8, 128), (16, 0)]))
    row_group_size = None
    if row_groups and group_size != num_inputs:
        row_group_size = min(row_groups, group_size)
    elif row_groups:
        row_group_size = row_groups
    weight = IntegerWeight.empty(*shape, bits, group_size, row_bits, torch.device("cpu"), code, row_group_size)
    generator = torch.Generator().manual_seed(draw(INTS(0, 1 << 32)))
    weight.words_OW.random_(-(1 << 31), 1 << 31, generator=generator)
    weight.scales_OG.uniform_(0.001, 0.01, generator=generator)
    if code == "affine":
        weight.zeros_OG.uniform_(-0.01 * weight.middle, 0.001 * weight.middle, generator=generator)
    elif code == "integer" and draw(strategies.booleans()):
        weight.zeros_OG.random_(0, 1 << bits, generator=generator)
    else:
        weight.zeros_OG.fill_(weight.middle)
    return weight


def rounded(x: torch.Tensor, weight: IntegerWeight) -> torch.Tensor:
    """The rows after they were rounded to integers, in float64."""
    largest, num_inputs = LARGEST[weight.row_bits], x.shape[1]
    group_size = weight.row_group_size or num_inputs
    x_TGg = torch.nn.functional.pad(x.float(), (0, -num_inputs % group_size)).unflatten(1, (-1, group_size))
    largest_TG1 = x_TGg.abs().amax(dim=2, keepdim=True)
    factors_TG1 = torch.where(largest_TG1 > 0, largest / largest_TG1, 0.0)
    rounded_TGg = (x_TGg * factors_TG1).round().double() * (largest_TG1 / largest).double()
    return rounded_TGg.flatten(1)[:, :num_inputs]


def sizes_of(weight: IntegerWeight) -> torch.Tensor:
    """The sizes of the numbers that a weight consists of, in float64: offsets are added on their own."""
    separate = replace(weight, zeros_OG=weight.zeros_OG.abs()) if weight.code == "affine" else weight
    return separate.dequantize(torch.float64).abs()


def check(found: torch.Tensor, x: torch.Tensor, weight: IntegerWeight, added: torch.Tensor) -> None:
    """`added`: bias and residual."""
    numbers_OI, rows = weight.dequantize(torch.float64), rounded(x, weight)
    size = rows.abs() @ sizes_of(weight).t() + added.abs()
    assert_near(found, rows @ numbers_OI.t() + added, size)


@hypothesis.settings(max_examples=40)
@hypothesis.given(DTYPES, INTS(0, 1 << 32), INTS(0, 40), weights(), strategies.booleans(), strategies.booleans())
def test_integer_linear_equals_the_formula(
    dtype: torch.dtype, seed: int, num_rows: int, weight: IntegerWeight, has_bias: bool, is_slice: bool
) -> None:
    num_outputs, num_inputs = weight.shape
    x = exact_rows(seed, num_rows, weight).to(dtype)
    x = torch.cat([x, x], dim=1)[:, :num_inputs] if is_slice else x
    bias = randn(seed + 1, num_outputs).to(dtype) if has_bias else None
    linear = IntegerLinear(weight, bias)
    added = torch.zeros(num_outputs) if bias is None else bias
    check(linear(x), x, weight, added.double())
    residual = randn(seed + 2, num_rows, num_outputs).to(dtype)
    check(linear.add_to(residual.clone(), x), x, weight, added.double() + residual.double())
    assert torch.equal(linear.weight.dequantize(torch.float64), weight.dequantize(torch.float64))
    if num_rows:
        assert torch.equal(linear(x[-1:]), linear(x)[-1:]), "a row's result depends on that row alone"


@hypothesis.settings(max_examples=40)
@hypothesis.given(DTYPES, INTS(0, 1 << 32), INTS(0, 40), weights(is_embedding=True))
def test_rows_of_an_embedding_are_those_of_the_weight(
    dtype: torch.dtype, seed: int, num_rows: int, weight: IntegerWeight
) -> None:
    embedding = IntegerEmbedding(IntegerLinear(weight, None), dtype)
    generator = torch.Generator().manual_seed(seed)
    rows_T = torch.randint(weight.shape[0], (num_rows,), generator=generator)
    assert len(embedding) == weight.shape[0]
    assert torch.equal(embedding.index_select(0, rows_T), weight.dequantize(dtype)[rows_T])


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    DTYPES,
    INTS(0, 1 << 32),
    INTS(0, 20),
    weights(num_outputs=96),
    strategies.booleans(),
    ANY_GATE,
)
def test_gated_integer_linear_equals_the_formula(
    dtype: torch.dtype, seed: int, num_rows: int, weight: IntegerWeight, has_bias: bool, gate: Gate
) -> None:
    x = exact_rows(seed, num_rows, weight).to(dtype)
    bias = randn(seed + 1, 96).to(dtype) if has_bias else None
    gated = GatedIntegerLinear(weight, bias, gate)
    rows, numbers_OI = rounded(x, weight), weight.dequantize(torch.float64)
    sums = rows @ numbers_OI.t() + (0 if bias is None else bias.double())
    size = (rows.abs() @ sizes_of(weight).t() + (0 if bias is None else bias.double().abs())).chunk(2, dim=1)
    assert_near(gated(x), gate_and_mul(gate, sums), size_of_gated(gate, *size))
    assert torch.equal(gated.weight.dequantize(torch.float64), numbers_OI)


def exact_rows(seed: int, num_rows: int, weight: IntegerWeight) -> torch.Tensor:
    """Rows of integers whose largest one, or that of each group, is the largest that there is, so that no number is
    rounded. In bfloat16, those of 16 bits are rounded to 8 of them before. Groups have different scales."""
    generator = torch.Generator().manual_seed(seed)
    largest, num_inputs = LARGEST[weight.row_bits], weight.shape[1]
    group_size = weight.row_group_size or num_inputs
    x = torch.randint(-largest, largest + 1, (num_rows, num_inputs), generator=generator).float()
    x[:, ::group_size] = largest
    return x / 8192 * 2.0 ** (torch.arange(num_inputs) // group_size % 5)


def test_rows_are_rounded_to_the_nearest_integers() -> None:
    weight = IntegerWeight.empty(16, 16, 8, 16, 8, torch.device("cpu"))
    weight.quantize_(torch.eye(16))
    x = torch.tensor([[127.0, 0.4, 0.6, -0.4, -0.6, 1.4, -1.4, 126.4, -127.0] + [0.0] * 7, [0.0] * 16])
    expected = [127, 0, 1, 0, -1, 1, -1, 126, -127] + [0] * 7
    assert IntegerLinear(weight, None)(x).round(decimals=3).tolist() == [expected, [0.0] * 16]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("row_bits", "row_group_size"), [(8, None), (8, 16), (16, None)])
def test_integer_linear_gives_nan_for_rows_that_are_not_finite(
    bad: float, row_bits: int, row_group_size: int | None
) -> None:
    weight = IntegerWeight.empty(16, 48, 8, 48, row_bits, torch.device("cpu"))  # pyright: ignore
    weight.quantize_(randn(0, 16, 48))
    weight = replace(weight, row_group_size=row_group_size)
    x = randn(1, 3, 48)
    expected = IntegerLinear(weight, None)(x)
    x[1, 20] = bad
    found = IntegerLinear(weight, None)(x)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_sums_of_the_largest_integers_are_exact() -> None:
    weight = IntegerWeight.empty(16, 1024, 8, 1024, 16, torch.device("cpu"))
    weight.words_OW.fill_(-1)
    weight.scales_OG.fill_(1)
    weight.zeros_OG.fill_(0)
    check_largest(weight, 255)


def test_sums_of_the_largest_integers_of_a_group_are_exact() -> None:
    """Some instruction sets add them up in 16 bits."""
    weight = IntegerWeight.empty(16, 1024, 4, 1024, 8, torch.device("cpu"), row_group_size=32)
    weight.words_OW.fill_(-1)
    weight.scales_OG.fill_(1)
    weight.zeros_OG.fill_(0)
    for number in (127.0, -127.0):
        found = IntegerLinear(weight, None)(torch.full((7, 1024), number))
        assert found.tolist() == [[15 * number * 1024] * 16] * 7


def test_sums_of_the_largest_integers_with_offsets_are_exact() -> None:
    """Offsets are multiplied with sums of 256 inputs, which float32 has exactly."""
    weight = IntegerWeight.empty(16, 1024, 8, 1024, 16, torch.device("cpu"), "affine")
    weight.words_OW.fill_(0)
    weight.scales_OG.fill_(1)
    weight.zeros_OG.fill_(3)
    check_largest(weight, 3)


def check_largest(weight: IntegerWeight, number: int) -> None:
    """Checks products of rows of the largest integers with a weight whose numbers are all the same."""
    x = torch.full((1, 1024), 32639.0)
    assert IntegerLinear(weight, None)(x).tolist() == [[pytest.approx(number * 32639 * 1024, rel=1e-7)] * 16]


def test_a_weight_without_inputs_is_refused() -> None:
    nothing, packed = torch.zeros(0), torch.zeros(16, 0, dtype=torch.int32)
    arguments = torch.zeros(1, 0, 16), nothing, nothing, 4, 8, 0, 0, False
    with pytest.raises(RuntimeError, match="raycore's kernels expect a packed weight with inputs"):
        torch.ops.raycore.integer_linear(torch.zeros(2, 0), packed, *arguments, 16)
