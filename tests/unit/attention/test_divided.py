"""Attention divided over workers equals attention to all keys, and follows the formula."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
import torch
from attention_contract import Batch, Outcome, Sizes, sizes
from divided_attention import MakePartial, divided, native_partial, torch_partial
from hypothesis import strategies
from native_kernels import needs_kernels

LONGEST = 400
BACKENDS = {
    "torch": torch_partial(LONGEST),
    "batch-invariant": torch_partial(LONGEST, batch_invariant=True),
    "native": native_partial,
}
PARTIALS = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=needs_kernels if name == "native" else ()) for name, make in BACKENDS.items()],
)


def attend(batch: Batch, num_workers: int, make: MakePartial) -> Outcome:
    """Of as many workers as possible, each has some query heads."""
    is_split = batch.sizes.num_kv_heads == 1 and batch.sizes.group % num_workers == 0
    return divided(batch, num_workers, make, num_workers if is_split else 1)


@PARTIALS
@hypothesis.settings(max_examples=60)
@hypothesis.given(
    drawn=sizes([torch.float32, torch.bfloat16, torch.float16], longest=300, most_rows=60),
    num_workers=strategies.sampled_from([1, 2, 4]),
)
def test_divided_attention_follows_the_formula(make: MakePartial, drawn: Sizes, num_workers: int) -> None:
    # norms of queries and keys in plain torch round more than once in 16 bits
    has_norm = drawn.has_norm and (make is native_partial or drawn.dtype == torch.float32)
    drawn = replace(drawn, has_norm=has_norm)
    hypothesis.note(f"{drawn}")
    batch = Batch(drawn)
    if batch.sequences:
        batch.check(attend(batch, num_workers, make))


@hypothesis.settings(max_examples=40)
@hypothesis.given(drawn=sizes([torch.float32], longest=200, most_rows=40, images=True))
def test_tokens_of_an_image_see_each_other(drawn: Sizes) -> None:
    batch = Batch(replace(drawn, turns_are_of_rows=False))
    if batch.sequences:
        batch.check(attend(batch, 2, BACKENDS["torch"]))


@PARTIALS
@pytest.mark.parametrize("num_workers", [2, 4])
@pytest.mark.parametrize("window", [None, 5, 20])
def test_chunks_may_begin_and_end_at_every_border(make: MakePartial, num_workers: int, window: int | None) -> None:
    """Blocks of 8 tokens of each of the workers."""
    for start in range(0, 40, 3):
        counts = [1, 7, 8, 9, 16, 17, 33]
        batch = Batch(
            Sizes(
                seed=start,
                group=4,
                block_size=8 * num_workers,
                window=window,
                tokens=(start, start + 1),
                chunks=tuple((start, count) for count in counts),
            )
        )
        batch.check(attend(batch, num_workers, make))


MIXED = Sizes(group=4, block_size=32, window=None, tokens=(40, 7, 130), chunks=((0, 9), (0, 50), (33, 12), (127, 3)))


@pytest.mark.parametrize(
    "make", [BACKENDS["batch-invariant"], pytest.param(native_partial, marks=needs_kernels)], ids=["torch", "native"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changed", [{}, {"window": 20}, {"softcap": 1.5, "has_sinks": True}, {"num_kv_heads": 2}])
def test_a_tokens_bits_do_not_depend_on_what_else_is_computed(make: MakePartial, dtype: torch.dtype, changed: dict):
    whole = Batch(replace(MIXED, dtype=dtype, **changed))
    together = attend(whole, 2, make).out_TX
    for sequence in whole.sequences:
        for parts in ([sequence.count], [1] * sequence.count, [sequence.count // 2, -(-sequence.count // 2)]):
            found, row = [], sequence.first_row
            blocks = whole.blocks
            for count in filter(None, parts):
                batch = _alone(whole, sequence, row, count, blocks)
                outcome = attend(batch, 2, make)
                found.append(outcome.out_TX)
                blocks, row = outcome.blocks, row + count
            rows = slice(sequence.first_row, sequence.first_row + sequence.count)
            assert torch.equal(torch.cat(found), together[rows]), (sequence, parts)


def _alone(whole: Batch, sequence, row: int, count: int, blocks: torch.Tensor) -> Batch:
    """A batch of some rows of one sequence."""
    start = sequence.start + row - sequence.first_row
    batch = Batch(
        replace(whole.sizes, tokens=(start,) if count == 1 else (), chunks=() if count == 1 else ((start, count),))
    )
    batch.qkv_TO, batch.blocks, batch.turns_PH = whole.qkv_TO[row : row + count], blocks, whole.turns_PH
    batch.norm_NH, batch.sinks_N = whole.norm_NH, whole.sinks_N
    batch.block_tables_SM = whole.block_tables_SM[[0, sequence.slot]]
    return batch
