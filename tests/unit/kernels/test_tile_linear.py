"""Linear layers on AMX against their formula in float64."""

from __future__ import annotations

from collections.abc import Iterator

import hypothesis
import pytest
import torch
from hypothesis import strategies
from kernels import assert_near, needs_kernels, randn

from raycore.kernels import library

pytestmark = needs_kernels

SEEDS = strategies.integers(0, 1 << 32)


@pytest.fixture(autouse=True, scope="module")
def _amx() -> Iterator[None]:
    before = library.load()
    assert before is not None
    if library.choose("amx") is None:
        pytest.skip("this processor hasn't got AMX")
    yield
    library.choose(before)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    SEEDS,
    strategies.integers(1, 700) | strategies.integers(0, 40),
    strategies.integers(1, 20),
    strategies.integers(1, 20),
    strategies.sampled_from([1, 3]),
)
def test_tile_linear(seed: int, num_rows: int, inner_tiles: int, panels: int, num_threads: int) -> None:
    num_inputs, num_outputs = 32 * inner_tiles, 16 * panels
    x = randn(seed, num_rows, 2 * num_inputs).bfloat16()[:, :num_inputs]
    weight, bias, residual = (
        randn(seed + 1 + i, *shape).bfloat16()
        for i, shape in enumerate([(num_outputs, num_inputs), (num_outputs,), (num_rows, num_outputs)])
    )
    packed, no_bias = torch.ops.raycore.pack_linear(weight), bias[:0]
    size = x.double().abs() @ weight.double().abs().t() + bias.abs() + residual.abs()
    product = x.double() @ weight.double().t()
    torch.set_num_threads(num_threads)
    assert_near(torch.ops.raycore.tile_linear(x, packed, no_bias), product, size)
    found = torch.ops.raycore.tile_linear(x, packed, bias)
    assert_near(found, product + bias.double(), size)
    sums = residual.clone()
    torch.ops.raycore.add_tile_linear(sums, x, packed, bias)
    assert_near(sums, product + bias.double() + residual.double(), size)
    if panels % 2 == 0:
        gate, up = (product + bias.double()).unflatten(1, (-1, 2, 16)).unbind(2)
        gated = (gate * torch.sigmoid(gate) * up).flatten(1)
        scale = size.unflatten(1, (-1, 2, 16)).prod(2).flatten(1)
        assert_near(torch.ops.raycore.gated_tile_linear(x, packed, bias), gated, scale)
    torch.set_num_threads(1)
    for row in {0, num_rows // 2, num_rows - 1} if num_rows else ():
        assert torch.equal(torch.ops.raycore.tile_linear(x[row : row + 1], packed, bias)[0], found[row])


def test_arguments_that_do_not_fit_are_refused() -> None:
    x, packed, none = torch.zeros(2, 32).bfloat16(), torch.zeros(16, 32).bfloat16(), torch.zeros(0).bfloat16()
    for call, what in (
        (lambda: torch.ops.raycore.pack_linear(packed[:8]), "a contiguous weight .O, I. in bfloat16, with multiples"),
        (lambda: torch.ops.raycore.tile_linear(x[:, :16], packed, none), "x .R, I. in bfloat16 with contiguous rows"),
        (lambda: torch.ops.raycore.tile_linear(x, packed, none.new_zeros(8)), "a contiguous bias .O. in bfloat16"),
        (lambda: torch.ops.raycore.add_tile_linear(x, x, packed, none), "a contiguous residual .R, O. in bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=f"raycore's kernels expect .*{what}"):
            call()
