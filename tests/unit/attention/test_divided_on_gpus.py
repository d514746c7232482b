"""Attention divided over workers with the kernels for GPUs equals attention to all keys, and follows the formula."""

from __future__ import annotations

from dataclasses import replace

import hypothesis
import pytest
import torch
from attention_contract import Batch, Sizes, sizes
from divided_attention import divided
from hypothesis import strategies
from interpreted_triton import DEVICE  # before whatever imports Triton

from raycore.attention.context_share import ContextShare
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.paged import TritonPartialAttention
from raycore.attention.spec import AttentionSpec

pytestmark = pytest.mark.skipif(DEVICE.type != "cpu", reason="the contract's tensors are on the CPU")


WITHOUT_SHRINKING = [hypothesis.Phase.reuse, hypothesis.Phase.generate]


def check(batch: Batch, num_workers: int, *, batch_invariant: bool = False) -> None:
    def make(spec: AttentionSpec, kv: KVTensors, share: ContextShare, num_heads: int) -> TritonPartialAttention:
        return TritonPartialAttention(spec, kv, share, num_heads, max_rows=2, batch_invariant=batch_invariant)

    whole = batch.sizes
    num_parts = num_workers if whole.num_kv_heads == 1 and whole.group % num_workers == 0 else 1
    batch.check(divided(batch, num_workers, make, num_parts))


@hypothesis.settings(max_examples=12, phases=WITHOUT_SHRINKING)
@hypothesis.given(
    drawn=sizes([torch.float32, torch.float16], longest=200, most_rows=20, images=True),
    num_workers=strategies.sampled_from([1, 2, 4]),
)
def test_divided_attention_follows_the_formula(drawn: Sizes, num_workers: int) -> None:
    drawn = replace(drawn, turns_are_of_rows=False)
    hypothesis.note(f"{drawn}")
    batch = Batch(drawn)
    if batch.sequences:
        check(batch, num_workers)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [None, 5, 20])
def test_chunks_may_begin_and_end_at_every_border(window: int | None, batch_invariant: bool) -> None:
    """Blocks of 8 tokens of each of two workers."""
    for start in (0, 7, 15, 24):
        chunks = tuple((start, count) for count in (1, 8, 17))
        sizes = Sizes(seed=start, group=4, block_size=16, window=window, tokens=(start, start + 1), chunks=chunks)
        check(Batch(sizes), 2, batch_invariant=batch_invariant)
