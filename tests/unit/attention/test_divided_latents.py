"""Latent attention divided over workers equals attention to all latents, and follows the formula."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import hypothesis
import pytest
import torch
from divided_latents import MakePartial, divided_latents, invariant_partial, native_partial, torch_partial
from hypothesis import strategies
from kernel_bits import INSTRUCTION_SETS
from latent_contract import LatentBatch, LatentSizes, latent_sizes, plain_torch
from native_kernels import needs_kernels

from raycore.kernels import library

NATIVE = pytest.param(native_partial, id="native", marks=needs_kernels)
INVARIANT = pytest.param(invariant_partial, id="batch-invariant")
PARTIALS = pytest.mark.parametrize("make", [pytest.param(torch_partial, id="torch"), INVARIANT, NATIVE])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    yield
    torch.set_num_threads(before)


@PARTIALS
@hypothesis.settings(max_examples=40)
@hypothesis.given(latent_sizes(DTYPES, longest=700, most_rows=40), strategies.sampled_from([1, 2, 4]))
def test_divided_attention_follows_the_formula(make: MakePartial, drawn: LatentSizes, num_workers: int) -> None:
    sizes = replace(drawn, block_size=drawn.block_size * num_workers)
    hypothesis.note(f"{sizes}")
    batch = LatentBatch(sizes)
    batch.check(divided_latents(batch, num_workers, make))


@PARTIALS
@pytest.mark.parametrize("num_workers", [2, 4])
def test_chunks_may_begin_and_end_at_every_border(make: MakePartial, num_workers: int) -> None:
    """Blocks of 8 tokens of each of the workers."""
    for start in range(0, 40, 3):
        chunks = ((start, 1), (start + 1, 1), *((start, count) for count in [7, 8, 9, 16, 17, 33]))
        batch = LatentBatch(LatentSizes(seed=start, block_size=8 * num_workers, chunks=chunks))
        outcome = divided_latents(batch, num_workers, make)
        batch.check(outcome)
        assert torch.allclose(outcome.out_TNR, plain_torch(batch).out_TNR, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("instructions", INSTRUCTION_SETS)
def test_native_kernels_follow_the_formula_for_long_sequences(
    many_threads: None, instructions: str, dtype: torch.dtype
) -> None:
    """Threads share the keys of so few rows. The second worker has no key of the first sequence."""
    if library.choose(instructions) is None:
        pytest.skip(f"no kernels with {instructions} here")
    try:
        for chunks in [((3, 1), (1500, 1)), ((3, 1),), ((1500, 1), (511, 3), (3, 130))]:
            sizes = LatentSizes(1, dtype, num_heads=16, rank=512, rotated_dim=64, block_size=32, chunks=chunks)
            batch = LatentBatch(sizes)
            batch.check(divided_latents(batch, 2, native_partial))
    finally:
        library.choose("auto")


@pytest.mark.parametrize("make", [INVARIANT, NATIVE])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [3, 4])
def test_a_tokens_bits_depend_on_no_other_token(make: MakePartial, dtype: torch.dtype, num_heads: int) -> None:
    """Each token of a step gives the same bits as a decode, once the caches have the tokens before it."""
    chunks = ((600, 1), (9, 1), (505, 40), (0, 20))
    sizes = LatentSizes(seed=2, dtype=dtype, num_heads=num_heads, rank=40, chunks=chunks)
    attend = partial(divided_latents, num_workers=2, make=make)
    batch = LatentBatch(sizes)
    outcome = attend(batch)
    first = 0
    for index, (start, count) in enumerate(chunks):
        for row in {0, count // 2, count - 1}:
            alone = LatentBatch(replace(sizes, chunks=((start + row, 1),)))
            alone.fused_TNW = batch.fused_TNW[first + row][None]
            alone.turns_PX = batch.turns_PX
            earlier = outcome.rows_XW[batch.places(index, range(start + row))]
            alone.rows_XW[alone.places(0, range(start + row))] = earlier
            assert torch.equal(attend(alone).out_TNR[0], outcome.out_TNR[first + row])
        first += count
