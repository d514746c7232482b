"""Attention to selected blocks of tokens, beside a formula in float64, and whatever steps its tokens are in."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from native_kernels import assert_near, randn
from torch import Tensor

from raycore.attention.batch_invariant import BatchInvariantAttention
from raycore.attention.block_selection import BlockRowAttention, BlockSelection
from raycore.attention.gather import GatherAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.scratch import GatherScratch
from raycore.attention.selected import SelectedAttention
from raycore.attention.spec import AttentionSpec
from raycore.layers.rope import Rope
from raycore.models.mixers.spec import HeadShape, IndexShape
from raycore.models.rotation import Rotation
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

INDEX = IndexShape(2, 14, 3, is_adjacent=False, num_rotated=6, block_size=5, num_local=1)
HEADS = HeadShape(6, 2, 12, index=INDEX)
ROTATION = Rotation(theta=100.0, fraction=0.5)
CPU, LENGTH, BLOCK_SIZE, SCALE = torch.device("cpu"), 43, 4, 0.3
TABLE = np.random.default_rng(1).permutation(12).astype(np.int32)[None]


@dataclass
class _Sequence:
    """A sequence of `LENGTH` tokens in one layer."""

    invariant: bool
    num_local: int = 1

    def __post_init__(self) -> None:
        heads, count = HEADS, HEADS.num_heads + 2 * HEADS.num_kv_heads
        self.qkv_TO = randn(3, LENGTH, count * heads.head_dim)
        self.queries_TKD, self.keys_TD = randn(4, LENGTH, 2, INDEX.head_dim), randn(5, LENGTH, INDEX.head_dim)
        self.rope = Rope(ROTATION, heads.head_dim, LENGTH, CPU)
        index = INDEX._replace(num_local=self.num_local)
        spec = AttentionSpec(
            heads=HeadShape(heads.num_heads, heads.num_kv_heads, heads.head_dim, index=index),
            windows=[None],
            qk_norms_NH=[None],
            norm_eps=1e-6,
            norm_offset=0.0,
            ropes=[self.rope],
            scale=SCALE,
            dtype=torch.float32,
            device=CPU,
            softcap=None,
            sinks_N=[None],
        )
        beside = [torch.zeros(TABLE.size * BLOCK_SIZE * INDEX.head_dim)]
        sizes = TABLE.size, heads.num_kv_heads, BLOCK_SIZE, heads.head_dim, torch.float32, CPU
        kv = KVTensors(1, *sizes, beside=beside)
        kind = BatchInvariantAttention if self.invariant else GatherAttention
        dense = kind(spec, kv, GatherScratch(kv, 1, kind.max_blocks(LENGTH + 4, BLOCK_SIZE)))
        parts = BlockSelection(spec, kv, batch_invariant=self.invariant), dense
        rows = BlockRowAttention(spec, kv, batch_invariant=self.invariant)
        self.attention = SelectedAttention(spec.heads, *parts, rows)

    def step(self, start: int, count: int) -> Tensor:
        rows = slice(start, start + count)
        beside = self.queries_TKD.flatten(1)[rows], self.keys_TD[rows]
        positions, slots = np.arange(start, start + count), np.zeros(count, np.int64)
        step = StepInputs(
            slots=slots[:1],
            counts=np.array([count]),
            starts=np.array([start]),
            num_decodes=int(count == 1),
            token_slots=slots,
            positions=positions,
            sampled=slots[:1],
            sampled_rows=np.array([count - 1]),
            next_positions=np.array([start + count]),
            draft_ids=None,
            generations=slots[:1],
            block_tables=TABLE,
            tables_version=0,
        )
        nothing = torch.empty(0, dtype=torch.int64)
        tables_SM, slots_T = torch.as_tensor(TABLE), torch.zeros(count, dtype=torch.int32)
        self.attention.begin(step, StepTensors(tables_SM, slots_T, torch.as_tensor(positions), nothing, nothing, None))
        return self.attention(0, torch.cat([self.qkv_TO[rows], *beside], 1))

    def expected(self) -> Tensor:
        """The results of all tokens by formula."""
        x_TNH = self.qkv_TO.double().view(LENGTH, -1, HEADS.head_dim)
        q_TNH, k_TKH, v_TKH = x_TNH.split([HEADS.num_heads, HEADS.num_kv_heads, HEADS.num_kv_heads], 1)
        q_TNH, k_TKH = self._turned(q_TNH), self._turned(k_TKH)
        keys_TNH, values_TNH = (each.repeat_interleave(HEADS.group, 1) for each in (k_TKH, v_TKH))
        scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH, keys_TNH) * SCALE
        seen_NTL = self.seen().repeat_interleave(HEADS.group, 0)
        weights_NTL = scores_NTL.masked_fill(~seen_NTL, -math.inf).softmax(-1)
        return torch.einsum("ntl,lnh->tnh", weights_NTL, values_TNH).flatten(1)

    def seen(self) -> Tensor:
        """By key-value head: whether a token sees another one, bool[K, T, L]."""
        halves = (self._in_pairs(each) for each in (self.queries_TKD.double(), self.keys_TD.double()[:, None]))
        queries_TKD, keys_T1D = (self._turned(each) for each in halves)
        seen_KTL = torch.zeros(2, LENGTH, LENGTH, dtype=torch.bool)
        for head, products_TL in enumerate(torch.einsum("tkd,ld->ktl", queries_TKD, keys_T1D[:, 0]).tolist()):
            for token, products_L in enumerate(products_TL):
                blocks = [range(first, min(first + 5, token + 1)) for first in range(0, token + 1, 5)]
                scores = [max(products_L[each] for each in block) for block in blocks]
                for local in range(min(self.num_local, len(blocks))):
                    scores[len(blocks) - 1 - local] = math.inf
                for block in sorted(range(len(blocks)), key=lambda each: -scores[each])[: INDEX.num_selected]:
                    seen_KTL[head, token, list(blocks[block])] = True
        return seen_KTL

    def _in_pairs(self, x_TND: Tensor) -> Tensor:
        turned_TNX, rest_TNX = x_TND.tensor_split([INDEX.num_rotated], 2)
        return torch.cat([turned_TNX.unflatten(2, (2, -1)).transpose(2, 3).flatten(2), rest_TNX], 2)

    def _turned(self, x_TNX: Tensor) -> Tensor:
        turned_TNX, rest_TNX = x_TNX.tensor_split([INDEX.num_rotated], 2)
        turns_T1C = self.rope.turns(torch.arange(LENGTH)).to(torch.complex128)[..., : INDEX.num_rotated // 2]
        pairs_TNC = torch.view_as_complex(turned_TNX.unflatten(2, (-1, 2)).contiguous()) * turns_T1C
        return torch.cat([torch.view_as_real(pairs_TNC).flatten(2), rest_TNX], 2)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("num_local", [0, 1, 2])
@pytest.mark.parametrize("first", [LENGTH, 16, 10])
def test_a_head_sees_the_blocks_with_the_highest_scores(invariant: bool, num_local: int, first: int) -> None:
    sequence = _Sequence(invariant, num_local)
    parts = [sequence.step(0, first)]
    if first < LENGTH:
        parts += [sequence.step(first, 1), sequence.step(first + 1, LENGTH - first - 1)]
    assert_near(torch.cat(parts), sequence.expected(), torch.tensor(10.0))


def test_the_heads_see_different_blocks() -> None:
    first_TL, second_TL = _Sequence(False).seen()
    assert not torch.equal(first_TL, second_TL)


@pytest.mark.parametrize("ends", [[1, 14, 15, 16, 30, LENGTH], [*range(1, LENGTH + 1)]])
def test_steps_change_no_bits(ends: list[int]) -> None:
    whole_TX, sequence = _Sequence(True).step(0, LENGTH), _Sequence(True)
    parts = [sequence.step(start, end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    assert torch.equal(torch.cat(parts), whole_TX)


def test_what_is_selected_is_kept_as_blocks_until_the_next_step() -> None:
    sequence = _Sequence(False)
    sequence.step(0, LENGTH)
    kept_SKC = sequence.attention._selected_SX
    assert kept_SKC is not None
    assert kept_SKC.nbytes == (LENGTH - 15) * HEADS.num_kv_heads * INDEX.num_selected * 4
    sequence.step(0, 1)
    assert sequence.attention._selected_SX is None


def test_what_the_layer_before_has_selected_is_freed_first() -> None:
    sequence = _Sequence(False)
    sequence.step(0, LENGTH)
    kept = weakref.ref(sequence.attention._selected_SX)
    alive = []
    select = sequence.attention._selection.select

    def observed(layer: int, beside_TX: Tensor) -> Tensor:
        alive.append(kept() is not None)
        return select(layer, beside_TX)

    sequence.attention._selection.select = observed
    beside = sequence.queries_TKD.flatten(1), sequence.keys_TD
    sequence.attention(0, torch.cat([sequence.qkv_TO, *beside], 1))
    assert alive == [False]
