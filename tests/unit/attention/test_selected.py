"""Attention to selected tokens, beside a formula in float64, and whatever steps its tokens are divided into."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from latent_contract import LatentBatch, LatentSizes, spec_of
from native_kernels import assert_near, needs_kernels, randn
from torch import Tensor

from raycore.attention.latent import TorchLatentAttention
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.native_latent import NativeLatentAttention
from raycore.attention.selected import NativeRowAttention, SelectedAttention, TorchRowAttention
from raycore.attention.selection import TokenSelection
from raycore.attention.spec import AttentionSpec
from raycore.layers.linear import AroundLinear
from raycore.models.mixers.spec import IndexShape

INDEX = IndexShape(3, head_dim=14, num_selected=8, is_adjacent=False, num_rotated=8, query_rank=5)
SIZES = LatentSizes(block_size=4, num_heads=4, rank=24, rotated_dim=8)
LENGTH = 41


class _Linear:
    """Makes the indexer's queries. Counts how often it is asked, and for how many rows."""

    def __init__(self) -> None:
        self.weight_XQ = randn(71, INDEX.num_heads * INDEX.head_dim, INDEX.query_rank)
        self.num_calls = self.num_rows = 0

    def __call__(self, x_TQ: Tensor) -> Tensor:
        self.num_calls += 1
        self.num_rows += len(x_TQ)
        return x_TQ @ self.weight_XQ.t()


class _Adapted(AroundLinear):
    """Counts on the rows of a step, as adapters do."""

    def __call__(self, x_TI: Tensor) -> Tensor:
        assert len(x_TI) == LENGTH
        return self._linear(x_TI)


def make_torch(spec: AttentionSpec, kv: LatentTensors, *, invariant: bool = False) -> SelectedAttention:
    dense = TorchLatentAttention(spec, kv, batch_invariant=invariant)
    rows = TorchRowAttention(spec, kv, batch_invariant=invariant)
    return SelectedAttention(spec.heads, TokenSelection(spec, kv, batch_invariant=invariant), dense, rows)


def make_invariant(spec: AttentionSpec, kv: LatentTensors) -> SelectedAttention:
    return make_torch(spec, kv, invariant=True)


def make_native(spec: AttentionSpec, kv: LatentTensors) -> SelectedAttention:
    parts = NativeLatentAttention(spec, kv), NativeRowAttention(spec, kv)
    return SelectedAttention(spec.heads, TokenSelection(spec, kv, batch_invariant=True), *parts)


MAKERS = [make_torch, make_invariant, pytest.param(make_native, marks=needs_kernels)]
INVARIANT = MAKERS[1:]
Make = Callable[[AttentionSpec, LatentTensors], SelectedAttention]


@dataclass
class _Layers:
    """Two layers with one sequence of `LENGTH` tokens: the second layer sees what the first one has selected."""

    make: Make
    index: IndexShape = INDEX

    def __post_init__(self) -> None:
        whole = self._batch((0, LENGTH))
        self.fused_TO, self.tables_SM = whole.fused_TNW.flatten(1), whole.tables_SM
        self.turns_PX, self.norm_R = whole.turns_PX, whole.norm_R
        self.made_of_TQ, self.keys_TD, self.weights_TN = (
            randn(80 + size, LENGTH, size) for size in (INDEX.query_rank, INDEX.head_dim, INDEX.num_heads)
        )
        self.queries = _Linear()
        num_blocks = len(whole.rows_XW) // SIZES.block_size
        beside = [torch.zeros(num_blocks * SIZES.block_size * INDEX.head_dim), None]
        sizes = num_blocks, SIZES.width, SIZES.block_size, torch.float32, torch.device("cpu")
        kv = LatentTensors(2, *sizes, beside=beside)
        spec = spec_of(whole)
        queries: Any = [self.queries, None]
        self.attention = self.make(
            replace(
                spec,
                heads=replace(spec.heads, index=self.index),
                index_queries=queries,
                **{name: getattr(spec, name) * 2 for name in ("windows", "qk_norms_NH", "ropes", "sinks_N")},
            ),
            kv,
        )

    def _batch(self, chunk: tuple[int, int]) -> LatentBatch:
        return LatentBatch(replace(SIZES, chunks=(chunk,)))

    def step(self, start: int, count: int) -> tuple[Tensor, Tensor]:
        """What both layers return for some tokens of the sequence."""
        batch, rows = self._batch((start, count)), slice(start, start + count)
        batch.tables_SM = self.tables_SM
        self.attention.begin(*batch.step())
        own_TX = torch.cat([each[rows] for each in (self.fused_TO, self.made_of_TQ, self.keys_TD, self.weights_TN)], 1)
        return self.attention(0, own_TX), self.attention(1, self.fused_TO[rows].clone())

    def expected(self) -> Tensor:
        """What both layers return for the whole sequence, by formula."""
        x_TNW, rank = self.fused_TO.double().view(LENGTH, -1, SIZES.width).clone(), SIZES.rank
        latents_TR = x_TNW[:, -1, :rank]
        x_TNW[:, -1, :rank] = latents_TR * (latents_TR.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm_R
        x_TNW[..., rank:] = self._turned(x_TNW[..., rank:])
        scores_TNL = torch.einsum("tnw,lw->tnl", x_TNW[:, :-1], x_TNW[:, -1]) * SIZES.scale
        scores_TNL.masked_fill_(~self._seen()[:, None], -math.inf)
        return torch.einsum("tnl,lr->tnr", scores_TNL.softmax(-1), x_TNW[:, -1, :rank]).flatten(1)

    def _seen(self) -> Tensor:
        """Whether a token sees another one, bool[T, L]."""
        q_TX = self.made_of_TQ.double() @ self.queries.weight_XQ.double().t()
        q_TND = self._index_turned(q_TX.view(LENGTH, INDEX.num_heads, -1))
        keys_LD = self._index_turned(self.keys_TD.double()[:, None])[:, 0]
        products_TNL = torch.einsum("tnd,ld->tnl", q_TND, keys_LD).clamp_min(0)
        scores_TL = torch.einsum("tn,tnl->tl", self.weights_TN.double(), products_TNL)
        seen_TL = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
        for token, scores_L in enumerate(scores_TL.tolist()):
            best = sorted(range(token + 1), key=lambda position: (-scores_L[position], position))
            seen_TL[token, best[: INDEX.num_selected]] = True
        return seen_TL

    def _index_turned(self, x_TND: Tensor) -> Tensor:
        turned_TNX, rest_TNX = x_TND[..., : SIZES.rotated_dim], x_TND[..., SIZES.rotated_dim :]
        if not self.index.is_adjacent:
            turned_TNX = turned_TNX.unflatten(2, (2, -1)).transpose(2, 3).flatten(2)
        return torch.cat([self._turned(turned_TNX), rest_TNX], 2)

    def _turned(self, x_TNX: Tensor) -> Tensor:
        turns_T1C = torch.view_as_complex(self.turns_PX.double().unflatten(1, (-1, 2)))[:LENGTH, None]
        return torch.view_as_real(torch.view_as_complex(x_TNX.unflatten(2, (-1, 2)).contiguous()) * turns_T1C).flatten(
            2
        )


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("is_adjacent", [False, True])
def test_a_token_sees_those_with_the_highest_scores(make: Make, is_adjacent: bool) -> None:
    layers = _Layers(make, INDEX._replace(is_adjacent=is_adjacent))
    first_TX, second_TX = layers.step(0, LENGTH)
    assert_near(first_TX, layers.expected(), torch.tensor(10.0))
    assert torch.equal(first_TX, second_TX)


@pytest.mark.parametrize("make", INVARIANT)
@pytest.mark.parametrize("ends", [[1, 8, 9, 20, LENGTH], [*range(1, LENGTH + 1)]])
def test_steps_change_no_bits(make: Make, ends: list[int]) -> None:
    whole_TX, _ = _Layers(make).step(0, LENGTH)
    layers = _Layers(make)
    parts = [layers.step(start, end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    for of_layer in zip(*parts, strict=True):
        assert torch.equal(torch.cat(of_layer), whole_TX)


@pytest.mark.parametrize("make", MAKERS)
def test_nothing_is_selected_where_all_tokens_are_seen(make: Make) -> None:
    layers = _Layers(make)
    layers.step(0, INDEX.num_selected)
    assert layers.queries.num_calls == 0
    # the keys were stored nevertheless
    found_TX, _ = layers.step(INDEX.num_selected, LENGTH - INDEX.num_selected)
    assert layers.queries.num_calls == 1
    assert_near(found_TX, layers.expected()[INDEX.num_selected :], torch.tensor(10.0))


@pytest.mark.parametrize("is_adapted", [False, True])
def test_queries_are_made_of_the_tokens_that_select_unless_adapters_need_all_rows(is_adapted: bool) -> None:
    layers = _Layers(make_torch)
    if is_adapted:
        layers.attention._selection._queries = [_Adapted(layers.queries), None]
    found_TX, _ = layers.step(0, LENGTH)
    assert layers.queries.num_rows == LENGTH - (0 if is_adapted else INDEX.num_selected)
    assert_near(found_TX, layers.expected(), torch.tensor(10.0))


def test_what_is_not_a_number_is_selected_last() -> None:
    layers = _Layers(make_torch)
    layers.keys_TD[3] = math.nan
    first_TX, _ = layers.step(0, LENGTH)
    assert first_TX.isfinite().all()
