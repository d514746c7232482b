"""Attention on GPUs: the kernels keep the contract of attention, and their launches promise more."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
import torch
from attention_contract import EPS, Batch, Outcome, Sizes, batch_invariant, gathering, native, sizes
from hypothesis import strategies
from interpreted_triton import DEVICE, DTYPES
from native_kernels import needs_kernels

from raycore.kernels.gpu.attention import LayerCache, PagedAttention, TokenLocations, chunk_tiles

WITHOUT_SHRINKING = [hypothesis.Phase.reuse, hypothesis.Phase.generate]
"""Making a failing example smaller takes minutes in Triton's interpreter."""


def paged(batch: Batch, max_rows: int = 8, **options) -> PagedAttention:
    sizes = batch.sizes
    return PagedAttention(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        block_size=sizes.block_size,
        device=DEVICE,
        scale=1 / math.sqrt(sizes.head_dim),
        softcap=sizes.softcap,
        norm_eps=EPS,
        norm_offset=sizes.norm_offset,
        dtype=sizes.dtype,
        max_rows=max_rows,
        **options,
    )


class OnDevice:
    """A copy of a batch on the device, and its outcome so far."""

    def __init__(self, batch: Batch) -> None:
        self.layer = LayerCache(
            batch.blocks.to(batch.sizes.cache_dtype or batch.sizes.dtype, copy=True).to(DEVICE),
            batch.turns_PH.to(DEVICE),
            batch.sizes.window,
            None if batch.norm_NH is None else batch.norm_NH.to(DEVICE),
            None if batch.sinks_N is None else batch.sinks_N.to(DEVICE),
        )
        self.qkv_TO = torch.empty_strided(
            batch.qkv_TO.shape, batch.qkv_TO.stride(), dtype=batch.sizes.dtype, device=DEVICE
        ).copy_(batch.qkv_TO)
        self.tables_SM = batch.tables_of_seen_blocks.to(DEVICE)
        self.slots_T, self.positions_T = batch.slots_T.to(DEVICE), batch.positions_T.to(DEVICE)
        shape = len(batch.slots_T), batch.sizes.num_heads * batch.sizes.head_dim
        self.out_TX = torch.full(shape, math.nan, dtype=batch.sizes.dtype, device=DEVICE)
        self.turns_TH = None if batch.turns_TH is None else batch.turns_TH.to(DEVICE)
        self.ends_T = None if batch.ends_T is None else batch.ends_T.to(DEVICE)
        self.num_tokens = len(batch.sizes.tokens)
        self.tokens, self.chunks = slice(self.num_tokens), slice(self.num_tokens, None)

    def locations(self, rows: slice) -> TokenLocations:
        turns_TH = None if self.turns_TH is None else self.turns_TH[rows]
        return TokenLocations(self.slots_T[rows], self.positions_T[rows], self.tables_SM, turns_TH)

    def write_cache(self, kernels: PagedAttention, rows: slice = slice(None)) -> None:
        kernels.write_cache(self.layer, self.qkv_TO[rows], self.locations(rows))

    def attend_tokens(self, kernels: PagedAttention, *, is_fused: bool) -> None:
        rows = self.tokens
        kernels.attend_tokens(self.layer, self.qkv_TO[rows], self.locations(rows), self.out_TX[rows], is_fused=is_fused)

    def attend_chunks(self, kernels: PagedAttention, batch: Batch, first_row: int) -> None:
        rows = [[s.slot, s.first_row, s.count, s.start] for s in batch.sequences if s.first_row >= first_row]
        chunks_4 = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        tiles_I4 = np.concatenate([chunk_tiles(*chunks_4, kernels.tile_rows), np.zeros((1, 4), np.int32)])
        kernels.attend_chunks(
            self.layer, self.qkv_TO, torch.as_tensor(tiles_I4).to(DEVICE), self.tables_SM, self.out_TX, self.ends_T
        )

    def outcome(self, qkv_TO: torch.Tensor | None = None) -> Outcome:
        blocks = self.layer.blocks.cpu().to(self.out_TX.dtype)
        return Outcome(self.out_TX.cpu(), blocks, None if qkv_TO is None else qkv_TO.cpu())


def unfused(batch: Batch, num_multiprocessors: int) -> Outcome:
    on_device, kernels = OnDevice(batch), paged(batch, num_multiprocessors=num_multiprocessors)
    on_device.write_cache(kernels)
    qkv_TO = on_device.qkv_TO.clone()
    on_device.attend_tokens(kernels, is_fused=False)
    on_device.attend_chunks(kernels, batch, on_device.num_tokens)
    return on_device.outcome(qkv_TO)


def fused(batch: Batch, num_multiprocessors: int) -> Outcome:
    on_device, kernels = OnDevice(batch), paged(batch, num_multiprocessors=num_multiprocessors)
    on_device.attend_tokens(kernels, is_fused=True)
    on_device.write_cache(kernels, on_device.chunks)
    on_device.attend_chunks(kernels, batch, on_device.num_tokens)
    return on_device.outcome()


def as_chunks(batch: Batch, num_multiprocessors: int) -> Outcome:
    """Tokens are chunks of one row."""
    on_device, kernels = OnDevice(batch), paged(batch, num_multiprocessors=num_multiprocessors)
    on_device.write_cache(kernels)
    on_device.out_TX[on_device.slots_T < 0] = 0
    on_device.attend_chunks(kernels, batch, 0)
    return on_device.outcome()


@pytest.mark.parametrize("attend", [unfused, fused, as_chunks])
@hypothesis.settings(max_examples=8, phases=WITHOUT_SHRINKING)
@hypothesis.given(
    sizes(DTYPES, longest=300, most_rows=20, cache_dtypes=(None, torch.float8_e4m3fn), images=True),
    strategies.sampled_from([1, 5]),
)
def test_paged_attention_equals_the_formula(
    attend: Callable[[Batch, int], Outcome], sizes: Sizes, num_multiprocessors: int
) -> None:
    hypothesis.note(f"{attend.__name__}, {num_multiprocessors} multiprocessors, {sizes}")
    batch = Batch(sizes)
    batch.check(attend(batch, num_multiprocessors))


@needs_kernels
@hypothesis.settings(max_examples=100)
@hypothesis.given(sizes([torch.float32, torch.bfloat16, torch.float16], longest=400, most_rows=40, images=True))
def test_native_attention_equals_the_formula(sizes: Sizes) -> None:
    hypothesis.note(f"{sizes}")
    batch = Batch(sizes)
    batch.check(native(batch))


@pytest.mark.parametrize("attend", [gathering, batch_invariant])
@hypothesis.settings(max_examples=40)
@hypothesis.given(sizes([torch.float32], longest=300, most_rows=40, images=True))
def test_plain_torch_attention_equals_the_formula(attend: Callable[[Batch], Outcome], sizes: Sizes) -> None:
    if attend is batch_invariant:
        sizes = replace(sizes, image=None)
    hypothesis.note(f"{sizes}")
    batch = Batch(sizes)
    if batch.sequences:
        batch.check(attend(batch))


@pytest.mark.parametrize("is_fused", [True, False])
def test_the_attention_of_a_row_has_the_same_bits_in_any_batch(is_fused: bool) -> None:
    """They depend neither on its index nor, on demand, on the other rows."""
    batch = Batch(Sizes(group=3, tokens=(290, 7, None, 150), window=280, softcap=2.0, has_sinks=True))
    by_row = bits(batch, [0, 1, 2, 3], is_fused, batch_invariant=True)
    for rows in [[0], [2, 3], [3, 0, 1]]:
        assert torch.equal(bits(batch, rows, is_fused, batch_invariant=True), by_row[rows])
    by_row = bits(batch, [0, 1, 2, 3], is_fused, num_multiprocessors=3)
    rows = [3, 2, 0, 1]
    assert torch.equal(bits(batch, rows, is_fused, num_multiprocessors=8), by_row[rows])


def bits(batch: Batch, rows: list[int], is_fused: bool, **options) -> torch.Tensor:
    on_device, kernels = OnDevice(batch), paged(batch, **options)
    if not is_fused:
        on_device.write_cache(kernels)
    locations = TokenLocations(on_device.slots_T[rows], on_device.positions_T[rows], on_device.tables_SM)
    out = on_device.out_TX[rows]
    kernels.attend_tokens(on_device.layer, on_device.qkv_TO[rows], locations, out, is_fused=is_fused)
    assert out.isfinite().all()
    return out.view(torch.int32).cpu()


def test_attention_launches_share_a_workspace() -> None:
    batch = Batch(Sizes(num_kv_heads=2, group=2, tokens=(300, 20, 200)))
    on_device, kernels = OnDevice(batch), paged(batch, num_multiprocessors=3)
    assert kernels.num_splits(3) > 1
    outcomes = []
    for _ in range(3):
        on_device.out_TX.fill_(math.nan)
        on_device.attend_tokens(kernels, is_fused=True)
        outcomes.append(on_device.out_TX.clone())
    batch.check(on_device.outcome())
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


def test_attention_split_into_any_number_of_splits_equals_the_formula() -> None:
    batch = Batch(Sizes(group=2, tokens=(800, 639, 640), has_norm=True, has_sinks=True))
    for num_multiprocessors, num_splits in ((1, 2), (4, 6), (100, 32)):
        assert paged(batch, num_multiprocessors=num_multiprocessors).num_splits(3) == num_splits
        batch.check(fused(batch, num_multiprocessors))


def test_the_number_of_attention_splits_falls_as_rows_fill_the_gpu() -> None:
    batch = Batch(Sizes(num_kv_heads=8))
    kernels = paged(batch, max_rows=300, num_multiprocessors=132)
    assert [kernels.num_splits(rows) for rows in (1, 2, 4, 16, 33, 66, 67, 300)] == [32, 32, 17, 5, 2, 1, 1, 1]
    kernels = paged(batch, max_rows=300, num_multiprocessors=132, batch_invariant=True)
    assert len({kernels.num_splits(rows) for rows in range(1, 301)}) == 1


def test_attention_takes_blocks_of_256_tokens_and_the_largest_heads() -> None:
    sizes = Sizes(dtype=torch.float16, group=16, head_dim=256, block_size=256, tokens=(270,), chunks=((250, 9),))
    batch = Batch(sizes)
    batch.check(fused(batch, 2))
    batch.check(unfused(batch, 2))


def test_attention_takes_a_cache_of_more_than_two_to_the_31_elements() -> None:
    """Its last blocks are used. The others are address space that is never touched."""
    batch = Batch(Sizes(dtype=torch.float16, tokens=(5, 20), chunks=((10, 9),)))
    on_device, kernels = OnDevice(batch), paged(batch)
    first = (1 << 31) // batch.blocks[0].numel() // 2
    blocks = torch.empty(2 * first + len(batch.blocks), batch.blocks.shape[1], dtype=torch.float16, device=DEVICE)
    blocks[2 * first :] = on_device.layer.blocks
    on_device.layer = LayerCache(blocks, on_device.layer.turns_PH)
    on_device.tables_SM = on_device.tables_SM + first
    on_device.attend_tokens(kernels, is_fused=True)
    on_device.write_cache(kernels, on_device.chunks)
    on_device.attend_chunks(kernels, batch, on_device.num_tokens)
    on_device.layer = LayerCache(blocks[2 * first :], on_device.layer.turns_PH)
    batch.check(on_device.outcome())


@pytest.mark.parametrize("attend", [unfused, fused, as_chunks])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_an_fp8_cache_stores_large_values_as_its_largest_number_and_nan_as_nan(attend) -> None:
    batch = Batch(Sizes(cache_dtype=torch.float8_e4m3fn, group=2, tokens=(20, 7), chunks=((3, 2),)))
    values_TH = batch.qkv_TO[:, -16:]
    values_TH[:, 3], values_TH[:, 5] = 1e5, -500.0
    batch.check(attend(batch, 1))
    values_TH[0, 7] = math.nan
    assert attend(batch, 1).out_TX[:, 7].isnan().tolist() == [True, False, False, False]


def test_attention_takes_a_step_without_rows() -> None:
    batch = Batch(Sizes())
    for attend in (unfused, fused, as_chunks):
        batch.check(attend(batch, 1))


def test_chunks_are_divided_into_tiles_longest_context_first() -> None:
    chunks = np.array([[4, 2, 5, 0], [1, 7, 4, 30], [3, 11, 1, 9]]).T
    tiles = chunk_tiles(*chunks, tile_rows=2)
    # slot, first row, number of rows, position of the first row
    assert tiles.tolist() == [[1, 9, 2, 32], [1, 7, 2, 30], [3, 11, 1, 9], [4, 6, 1, 4], [4, 4, 2, 2], [4, 2, 2, 0]]
    assert tiles.dtype == np.int32
    assert chunk_tiles(*chunks[:, :0], tile_rows=2).shape == (0, 4)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (Sizes(group=17), "17 query heads share 1 key-value heads"),
        (Sizes(head_dim=258), "the head dimension is 258"),
        (Sizes(dtype=torch.float64), "float64"),
    ],
)
def test_sizes_that_the_attention_kernels_lack_are_named(sizes: Sizes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        paged(Batch(sizes))
