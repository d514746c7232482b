"""Attention on GPUs: the kernels keep the contract of attention, and their launches promise more."""

from __future__ import annotations

import math
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest
import torch
from attention_contract import EPS, Batch, Outcome, Sizes, native, sizes
from hypothesis import strategies
from interpreted_triton import DEVICE, DTYPES
from kernels import needs_kernels

from raycore.kernels.gpu.attention import LayerCache, PagedAttention, TokenPlaces, chunk_tiles


def paged(batch: Batch, max_rows: int = 8, **options) -> PagedAttention:
    sizes = batch.sizes
    return PagedAttention(
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        block_size=sizes.block_size,
        turns_PH=batch.turns_PH.to(DEVICE),
        norm_eps=EPS,
        dtype=sizes.dtype,
        max_rows=max_rows,
        **options,
    )


class OnDevice:
    """A copy of a batch on the device, and its outcome so far."""

    def __init__(self, batch: Batch) -> None:
        self.layer = LayerCache(
            batch.blocks.clone().to(DEVICE),
            batch.sizes.window,
            None if batch.norm_NH is None else batch.norm_NH.to(DEVICE),
        )
        self.qkv_TO = torch.empty_strided(
            batch.qkv_TO.shape, batch.qkv_TO.stride(), dtype=batch.sizes.dtype, device=DEVICE
        ).copy_(batch.qkv_TO)
        self.tables_SM = batch.block_tables_SM.to(DEVICE)
        self.slots_T, self.positions_T = batch.slots_T.to(DEVICE), batch.positions_T.to(DEVICE)
        shape = len(batch.slots_T), batch.sizes.num_heads * batch.sizes.head_dim
        self.out_TX = torch.full(shape, math.nan, dtype=batch.sizes.dtype, device=DEVICE)
        self.num_tokens = len(batch.sizes.tokens)
        self.tokens, self.chunks = slice(self.num_tokens), slice(self.num_tokens, None)

    def places(self, rows: slice) -> TokenPlaces:
        return TokenPlaces(self.slots_T[rows], self.positions_T[rows], self.tables_SM)

    def write_cache(self, kernels: PagedAttention, rows: slice = slice(None)) -> None:
        kernels.write_cache(self.layer, self.qkv_TO[rows], self.places(rows))

    def attend_tokens(self, kernels: PagedAttention, *, is_fused: bool) -> None:
        rows = self.tokens
        kernels.attend_tokens(self.layer, self.qkv_TO[rows], self.places(rows), self.out_TX[rows], is_fused=is_fused)

    def attend_chunks(self, kernels: PagedAttention, batch: Batch, first_row: int) -> None:
        rows = [[s.slot, s.first_row, s.count, s.start] for s in batch.sequences if s.first_row >= first_row]
        chunks_4 = np.array(rows, dtype=np.int64).reshape(-1, 4).T
        tiles_I4 = np.concatenate([chunk_tiles(*chunks_4, kernels.tile_rows), np.zeros((1, 4), np.int32)])
        kernels.attend_chunks(
            self.layer, self.qkv_TO, torch.as_tensor(tiles_I4).to(DEVICE), self.tables_SM, self.out_TX
        )

    def outcome(self, qkv_TO: torch.Tensor | None = None) -> Outcome:
        return Outcome(self.out_TX.cpu(), self.layer.blocks.cpu(), None if qkv_TO is None else qkv_TO.cpu())


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
@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(sizes(DTYPES, longest=400, most_rows=40), strategies.sampled_from([1, 3, 10]))
def test_attention(attend: Callable[[Batch, int], Outcome], sizes: Sizes, num_multiprocessors: int) -> None:
    batch = Batch(sizes)
    batch.check(attend(batch, num_multiprocessors))


@needs_kernels
@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(sizes([torch.float32, torch.bfloat16, torch.float16], longest=400, most_rows=40))
def test_attention_on_cpus(sizes: Sizes) -> None:
    batch = Batch(sizes)
    batch.check(native(batch))
