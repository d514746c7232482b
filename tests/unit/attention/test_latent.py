"""Latent attention keeps its contract: in plain torch, with and without batch invariance, and in native kernels."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
import torch
from kernel_bits import INSTRUCTION_SETS
from latent_contract import LatentBatch, LatentSizes, Outcome, batch_invariant, latent_sizes, native, plain_torch
from native_kernels import needs_kernels

from raycore.kernels import library

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = [plain_torch, batch_invariant]
INVARIANT = [batch_invariant, pytest.param(native, marks=needs_kernels)]
LONG = LatentSizes(seed=1, num_heads=16, rank=512, rotated_dim=64, chunks=((1500, 1), (700, 1), (511, 3), (3, 1030)))


@pytest.fixture
def many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("attend", PLAIN)
@hypothesis.settings(max_examples=40)
@hypothesis.given(latent_sizes(DTYPES, longest=400, most_rows=40))
def test_plain_torch_equals_the_formula(attend: Callable[[LatentBatch], Outcome], sizes: LatentSizes) -> None:
    batch = LatentBatch(sizes)
    batch.check(attend(batch))


@needs_kernels
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
@hypothesis.settings(max_examples=40)
@hypothesis.given(latent_sizes(DTYPES, longest=1200, most_rows=70))
def test_native_kernels_equal_the_formula(instructions: str, sizes: LatentSizes) -> None:
    if library.choose(instructions) is None:
        pytest.skip(f"no kernels with {instructions} here")
    try:
        batch = LatentBatch(sizes)
        batch.check(native(batch))
    finally:
        library.choose("auto")


@needs_kernels
def test_native_kernels_equal_the_formula_for_long_sequences() -> None:
    batch = LatentBatch(LONG)
    batch.check(native(batch))


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bits(many_threads: None, dtype: torch.dtype) -> None:
    few = LatentSizes(seed=4, dtype=dtype, num_heads=16, rank=64, chunks=((2000, 1), (600, 2)))
    shared = native(LatentBatch(few))
    torch.set_num_threads(1)
    alone = native(LatentBatch(few))
    assert torch.equal(shared.out_TNR, alone.out_TNR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attend", INVARIANT)
def test_a_tokens_bits_depend_on_no_other_token(attend: Callable[[LatentBatch], Outcome], dtype: torch.dtype) -> None:
    """Each token of a step gives the same bits as a decode, once the cache has the tokens before it."""
    sizes = LatentSizes(seed=2, dtype=dtype, num_heads=3, rank=40, chunks=((600, 1), (9, 1), (505, 40), (0, 20)))
    batch = LatentBatch(sizes)
    outcome = attend(batch)
    first = 0
    for index, (start, count) in enumerate(sizes.chunks):
        for row in {0, count // 2, count - 1}:
            alone = LatentBatch(LatentSizes(**{**vars_of(sizes), "chunks": ((start + row, 1),)}))
            alone.fused_TNW = batch.fused_TNW[first + row][None]
            alone.turns_PX = batch.turns_PX
            earlier = outcome.rows_XW[batch.places(index, range(start + row))]
            alone.rows_XW[alone.places(0, range(start + row))] = earlier
            assert torch.equal(attend(alone).out_TNR[0], outcome.out_TNR[first + row])
        first += count


def vars_of(sizes: LatentSizes) -> dict[str, object]:
    return {name: getattr(sizes, name) for name in sizes.__dataclass_fields__}
