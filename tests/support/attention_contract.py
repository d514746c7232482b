"""What every implementation of attention over a paged KV cache promises, checked against a formula in float64.

A `Batch` is the input of one step in one layer: the rows of its tokens, and the cache before it. An implementation is
tested through an adapter, a function that takes a batch and returns an `Outcome`. It must not change the batch.

The cache's layout is that of `KVTensors`. Whatever no token may read is NaN. If the cache rounds what it stores, that
is checked first, and then attention to what it has stored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import torch
from hypothesis import strategies
from native_kernels import ROUNDING, assert_near, randn
from torch import Tensor

from raycore.attention.batch_invariant import BatchInvariantAttention
from raycore.attention.gather import GatherAttention
from raycore.attention.kv_tensors import KVTensors
from raycore.attention.scratch import GatherScratch
from raycore.attention.spec import AttentionSpec
from raycore.layers.rope import Rope
from raycore.models.mixers.spec import HeadShape
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors
from raycore.step.features import StepFeatures

CPU = torch.device("cpu")
EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """What a batch is made of. Hypothesis prints it when a test fails."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    """None: `dtype`."""
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 16
    block_size: int = 16
    window: int | None = None
    has_norm: bool = False
    norm_offset: float = 0.0
    softcap: float | None = None
    has_sinks: bool = False
    tokens: tuple[int | None, ...] = ()
    """The positions of the first rows, which are tokens of different sequences. None: a padding row."""
    chunks: tuple[tuple[int, int], ...] = ()
    """The position of the first token, and the number of tokens, of chunks of more sequences."""
    num_shared_blocks: int = 0
    """Sequences that have so many blocks before their first row have these blocks in common."""
    position_dtype: torch.dtype = torch.int32
    image: tuple[int, int] | None = None
    """In each chunk, the first row of an image and its number of rows, which see each other. None: there are none."""
    turns_are_of_rows: bool = False
    """Whether a row's rotation doesn't follow from its position."""

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass(frozen=True)
class Sequence:
    """The rows of one sequence in a batch."""

    slot: int
    first_row: int
    count: int
    start: int
    """The position of the first row."""


@dataclass
class Outcome:
    """What an implementation computed."""

    out_TX: Tensor
    blocks: Tensor
    """The cache after the step, in the batch's dtype."""
    qkv_TO: Tensor | None = None
    """With rotated queries and keys. None: the implementation doesn't promise to leave them there."""


@dataclass
class Batch:
    """The input of one step in one layer. Tensors are on the CPU."""

    sizes: Sizes
    sequences: list[Sequence] = field(init=False)
    slots_T: Tensor = field(init=False)
    positions_T: Tensor = field(init=False)
    block_tables_SM: Tensor = field(init=False)
    """Slot 0 is unused. What lies behind a sequence's blocks must not be read."""
    blocks: Tensor = field(init=False)
    """In the batch's dtype, but of numbers that the cache's dtype has."""
    qkv_TO: Tensor = field(init=False)
    """A slice of longer rows."""
    norm_NH: Tensor | None = field(init=False)
    sinks_N: Tensor | None = field(init=False)
    turns_PH: Tensor = field(init=False)
    turns_TH: Tensor | None = field(init=False)
    """By row. None: `turns_PH` by position."""
    ends_T: Tensor | None = field(init=False)
    """int32: how many of its sequence's first tokens a row sees. None: those up to itself."""

    def __post_init__(self) -> None:
        sizes = self.sizes
        self.sequences, slots, positions = [], [], []
        for start, count in [*((position, 1) for position in sizes.tokens), *sizes.chunks]:
            if start is not None:
                self.sequences.append(Sequence(len(self.sequences) + 1, len(slots), count, start))
            slots += [-1 if start is None else len(self.sequences)] * count
            positions += range(start or 0, (start or 0) + count)
        self.slots_T = torch.tensor(slots, dtype=torch.int32)
        self.positions_T = torch.tensor(positions, dtype=sizes.position_dtype)
        self._make_tables()
        width = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim
        self.qkv_TO = randn(sizes.seed, len(slots), width + 16).to(sizes.dtype)[:, :width]
        norm_NH = randn(sizes.seed + 1, sizes.num_heads + sizes.num_kv_heads, sizes.head_dim).to(sizes.dtype)
        self.norm_NH = norm_NH if sizes.has_norm else None
        self.sinks_N = randn(sizes.seed + 3, sizes.num_heads) * 3 if sizes.has_sinks else None
        generator = torch.Generator().manual_seed(sizes.seed)
        self.turns_PH, turns_TH = (
            torch.stack([angles.cos(), angles.sin()], -1).flatten(1)
            for angles in (
                torch.rand(num_rows, sizes.head_dim // 2, generator=generator) * 6
                for num_rows in (max(positions, default=0) + 1, len(positions))
            )
        )
        self.turns_TH = turns_TH if sizes.turns_are_of_rows else None
        self.ends_T = None if sizes.image is None else self._ends(*sizes.image)

    def _ends(self, first: int, count: int) -> Tensor:
        ends_T = (self.positions_T + 1).int()
        for each in self.sequences[-len(self.sizes.chunks) :] if self.sizes.chunks else ():
            last = min(first + count, each.count)
            ends_T[each.first_row + first : each.first_row + last] = each.start + last
        return ends_T

    def _make_tables(self) -> None:
        sizes = self.sizes
        ends = [sequence.start + sequence.count for sequence in self.sequences]
        num_blocks = sizes.num_shared_blocks + sum(-(-end // sizes.block_size) for end in ends) + 1
        generator = torch.Generator().manual_seed(sizes.seed)
        unused = torch.randperm(num_blocks, generator=generator).int()
        shared, unused = unused.split([sizes.num_shared_blocks, num_blocks - sizes.num_shared_blocks])
        widest = -(-max(ends, default=1) // sizes.block_size)
        self.block_tables_SM = torch.full((len(ends) + 1, widest + 1), -1, dtype=torch.int32)
        self.blocks = torch.full(
            (num_blocks, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim), math.nan, dtype=sizes.dtype
        )
        for sequence, end in zip(self.sequences, ends, strict=True):
            count = -(-end // sizes.block_size)
            table_M = unused[:count].clone()
            unused = unused[count:]
            if sequence.start >= sizes.num_shared_blocks * sizes.block_size:
                table_M[: len(shared)] = shared
            self.block_tables_SM[sequence.slot, :count] = table_M
            self._store(self.blocks, sequence, range(sequence.start), self._earlier(sequence))
        self.blocks = self.blocks.view(-1, sizes.block_size * sizes.head_dim)
        if sizes.cache_dtype is not None:
            self.blocks = self.blocks.to(sizes.cache_dtype).to(sizes.dtype)

    def _earlier(self, sequence: Sequence) -> Tensor:
        """Keys and values of the tokens before a sequence's first row. Those of shared blocks are equal."""
        sizes = self.sizes
        shape = 2, sizes.num_kv_heads, sizes.head_dim
        num_shared = sizes.num_shared_blocks * sizes.block_size
        shared, own = (
            randn(sizes.seed + 2, num_shared, *shape),
            randn(sizes.seed + 2 + sequence.slot, sequence.start, *shape),
        )
        earlier = own if sequence.start < num_shared else torch.cat([shared, own[num_shared:]])
        return earlier.to(sizes.dtype)

    def _store(self, blocks: Tensor, sequence: Sequence, positions: range, kv_T2KH: Tensor) -> None:
        size = self.sizes.block_size
        blocks = blocks.view(-1, 2, self.sizes.num_kv_heads, size, self.sizes.head_dim)
        positions_T = torch.arange(positions.start, positions.stop)
        block_ids_T = self.block_tables_SM[sequence.slot].long()[positions_T // size]
        blocks[block_ids_T, :, :, positions_T % size] = kv_T2KH

    def _load(self, blocks: Tensor, sequence: Sequence, count: int) -> Tensor:
        size = self.sizes.block_size
        blocks = blocks.view(-1, 2, self.sizes.num_kv_heads, size, self.sizes.head_dim)
        positions_T = torch.arange(count)
        return blocks[self.block_tables_SM[sequence.slot].long()[positions_T // size], :, :, positions_T % size]

    @cached_property
    def tables_of_seen_blocks(self) -> Tensor:
        """The block tables without blocks that no token sees, because all of their keys are before the windows.

        For implementations that promise not to read these blocks.
        """
        tables_SM, window = self.block_tables_SM.clone(), self.sizes.window or 0
        for sequence in self.sequences if window else ():
            num_unseen = max(sequence.start - window + 1, 0) // self.sizes.block_size
            tables_SM[sequence.slot, :num_unseen] = -1
        return tables_SM

    @cached_property
    def expected(self) -> Outcome:
        """The outcome by formula, in float64. Queries and keys are rounded to the batch's dtype."""
        return self._expected(None)

    def _expected(self, stored: Tensor | None) -> Outcome:
        """The outcome of attention to `stored`, a cache after the step. None: to what is stored by formula."""
        sizes = self.sizes
        x_TNH = self.qkv_TO.double().unflatten(1, (-1, sizes.head_dim))
        num_turned = sizes.num_heads + sizes.num_kv_heads
        turned_TNH = self._turned(x_TNH[:, :num_turned]).to(sizes.dtype).double()
        is_padding_T = self.slots_T < 0
        turned_TNH[is_padding_T] = x_TNH[is_padding_T, :num_turned]
        values_TKH = x_TNH[:, num_turned:]
        out_TNH = torch.zeros(len(x_TNH), sizes.num_heads, sizes.head_dim, dtype=torch.float64)
        blocks = self.blocks.double()
        for sequence in self.sequences:
            rows = slice(sequence.first_row, sequence.first_row + sequence.count)
            kv_T2KH = torch.stack([turned_TNH[rows, sizes.num_heads :], values_TKH[rows]], 1)
            self._store(blocks, sequence, range(sequence.start, sequence.start + sequence.count), kv_T2KH)
            kv_L2KH = torch.cat([self._earlier(sequence).double(), kv_T2KH])
            if stored is not None:
                kv_L2KH = self._load(stored, sequence, len(kv_L2KH)).double()
            ends_T = None if self.ends_T is None else self.ends_T[rows]
            out_TNH[rows] = self._attended(turned_TNH[rows, : sizes.num_heads], kv_L2KH, ends_T)
        return Outcome(out_TNH.flatten(1), blocks, torch.cat([turned_TNH, values_TKH], 1).flatten(1))

    @cached_property
    def _size_of_sums(self) -> float:
        """The size of the numbers that are added up to an output."""
        if not self.sequences:
            return 0.0
        sizes = self.sizes
        assert self.expected.qkv_TO is not None
        turned = self.expected.qkv_TO[:, : -sizes.num_kv_heads * sizes.head_dim].abs().max()
        values = self.qkv_TO.double().abs().max()
        # A number that is just between two others may be rounded to either. An element of a query or key then moves a
        # score, and so a weight's share, by its product.
        return float(4 * values * (1 + turned.square() * sizes.head_dim**-0.5))

    def _turned(self, x_TNH: Tensor) -> Tensor:
        if self.norm_NH is not None:
            x_TNH = (
                x_TNH
                / (x_TNH.square().mean(-1, keepdim=True) + EPS).sqrt()
                * (self.sizes.norm_offset + self.norm_NH.double())
            )
        turns_TH = self.turns_PH[self.positions_T.long()] if self.turns_TH is None else self.turns_TH
        turns_TC = torch.view_as_complex(turns_TH.double().unflatten(1, (-1, 2)))
        turned_TNC = torch.view_as_complex(x_TNH.unflatten(2, (-1, 2)).contiguous()) * turns_TC[:, None]
        return torch.view_as_real(turned_TNC).flatten(2)

    def _attended(self, q_TNH: Tensor, kv_L2KH: Tensor, ends_T: Tensor | None) -> Tensor:
        """Attention of a sequence's last tokens to all of its keys and values."""
        keys_LNH, values_LNH = kv_L2KH.repeat_interleave(self.sizes.group, 2).unbind(1)
        behind_TL = torch.arange(len(kv_L2KH) - len(q_TNH), len(kv_L2KH))[:, None] - torch.arange(len(kv_L2KH))
        is_seen_TL = behind_TL >= 0 if ends_T is None else torch.arange(len(kv_L2KH)) < ends_T[:, None]
        is_seen_TL &= behind_TL < (self.sizes.window or len(kv_L2KH))
        scores_NTL = torch.einsum("tnh,lnh->ntl", q_TNH, keys_LNH) * self.sizes.head_dim**-0.5
        if self.sizes.softcap is not None:
            scores_NTL = self.sizes.softcap * torch.tanh(scores_NTL / self.sizes.softcap)
        scores_NTL = scores_NTL.masked_fill(~is_seen_TL, -math.inf)
        if self.sinks_N is not None:
            sinks_NT1 = self.sinks_N.double()[:, None, None].expand(-1, len(q_TNH), 1)
            weights_NTL = torch.cat([scores_NTL, sinks_NT1], 2).softmax(-1)[..., :-1]
        else:
            weights_NTL = scores_NTL.softmax(-1)
        return torch.einsum("ntl,lnh->tnh", weights_NTL, values_LNH)

    def check(self, outcome: Outcome) -> None:
        """Fails if the outcome isn't the expected one."""
        expected = self.expected
        # the cache had NaN where rows are stored
        is_stored = self.blocks.isnan() & ~expected.blocks.isnan()
        if self.sizes.cache_dtype is None:
            _assert_turned(outcome.blocks[is_stored], expected.blocks[is_stored])
            assert_near(outcome.out_TX, expected.out_TX, self._size_of_sums)
        else:
            found = outcome.blocks[is_stored].double()
            _assert_rounded(found, expected.blocks[is_stored], self.sizes)
            assert_near(outcome.out_TX, self._expected(outcome.blocks).out_TX, self._size_of_sums)
        others = outcome.blocks[~is_stored], self.blocks[~is_stored]
        assert torch.equal(*(each.view(torch.uint8) for each in others)), "other places of the cache have changed"
        if outcome.qkv_TO is not None and expected.qkv_TO is not None:
            _assert_turned(outcome.qkv_TO, expected.qkv_TO)


def _assert_turned(found: Tensor, expected: Tensor) -> None:
    """Both were rounded, and possibly in different directions."""
    assert_near(found, expected, 2 * expected.abs() + 1)


def _assert_rounded(found: Tensor, expected: Tensor, sizes: Sizes) -> None:
    """Each number is one of the cache's dtype, and as near as the numbers of both dtypes are."""
    assert sizes.cache_dtype is not None
    assert torch.equal(found, found.to(sizes.cache_dtype).double())
    format = torch.finfo(sizes.cache_dtype)
    expected = expected.clamp(format.min, format.max)
    before = ROUNDING[sizes.dtype] * (2 * expected.abs() + 1)
    allowed = format.eps / 2 * expected.abs() + format.smallest_normal * format.eps / 2 + before
    assert ((found - expected).abs() <= allowed).all()


def sizes(
    dtypes: list[torch.dtype],
    longest: int,
    most_rows: int,
    cache_dtypes: tuple[torch.dtype | None, ...] = (None,),
    *,
    images: bool = False,
) -> strategies.SearchStrategy[Sizes]:
    """Sizes of batches with sequences up to `longest` tokens, and up to `most_rows` rows in a chunk.

    `images`: some have images, and rows that are rotated by something else than their position.
    """
    rows = strategies.integers(0, most_rows)
    position = strategies.integers(0, longest - 1) | strategies.integers(0, 20)
    chunk = strategies.tuples(position | strategies.just(0), strategies.integers(1, most_rows))
    return strategies.builds(
        Sizes,
        seed=strategies.integers(0, 1 << 32),
        dtype=strategies.sampled_from(dtypes),
        cache_dtype=strategies.sampled_from(cache_dtypes),
        num_kv_heads=strategies.integers(1, 2),
        group=strategies.sampled_from([1, 2, 3, 4, 7]),
        head_dim=strategies.sampled_from([8, 16, 64, 80, 128]),
        block_size=strategies.sampled_from([16, 32, 48, 64, 256]),
        window=strategies.none() | strategies.integers(1, longest),
        has_norm=strategies.booleans(),
        norm_offset=strategies.sampled_from([0.0, 1.0]),
        softcap=strategies.sampled_from([None, None, 0.7, 20.0]),
        has_sinks=strategies.booleans(),
        tokens=strategies.lists(position | strategies.none(), max_size=3).map(tuple),
        chunks=strategies.lists(chunk, max_size=2).map(tuple),
        num_shared_blocks=strategies.integers(0, 2),
        position_dtype=strategies.sampled_from([torch.int32, torch.int64]),
        image=strategies.none() | strategies.tuples(rows, rows) if images else strategies.none(),
        turns_are_of_rows=strategies.booleans() if images else strategies.just(False),
    )


def gathering(batch: Batch) -> Outcome:
    """Plain torch."""
    return _plain_torch(GatherAttention, batch)


def batch_invariant(batch: Batch) -> Outcome:
    """Plain torch whose bits don't depend on the batch."""
    return _plain_torch(BatchInvariantAttention, batch)


def _plain_torch(attention: type[GatherAttention | BatchInvariantAttention], batch: Batch) -> Outcome:
    """Plain torch knows no padding rows. It multiplies what no token may read by 0, so that must not be NaN."""
    sizes, is_real = batch.sizes, batch.slots_T >= 0
    num_blocks = len(batch.blocks) // (2 * sizes.num_kv_heads)
    kv = KVTensors(1, num_blocks, sizes.num_kv_heads, sizes.block_size, sizes.head_dim, sizes.dtype, CPU)
    kv.blocks[0].copy_(batch.blocks.nan_to_num(0.0))
    spec = spec_of(batch, sizes)
    max_blocks = attention.max_blocks(int(batch.positions_T.max()) + 1, sizes.block_size)
    attend = attention(spec, kv, GatherScratch(kv, 2, max_blocks))
    step, tensors = step_of(batch, is_real)
    attend.begin(step, tensors)
    qkv_TO = batch.qkv_TO[is_real].contiguous()
    out_TX = torch.zeros(len(is_real), sizes.num_heads * sizes.head_dim, dtype=sizes.dtype)
    out_TX[is_real] = attend(0, qkv_TO)
    blocks = kv.blocks[0]
    blocks[batch.blocks.isnan() & (blocks == 0)] = math.nan
    return Outcome(out_TX, blocks)


def spec_of(batch: Batch, sizes: Sizes) -> AttentionSpec:
    """What attention of these sizes has to know of the batch."""
    return AttentionSpec(
        heads=HeadShape(sizes.num_heads, sizes.num_kv_heads, sizes.head_dim),
        windows=[sizes.window],
        qk_norms_NH=[batch.norm_NH],
        norm_eps=EPS,
        norm_offset=sizes.norm_offset,
        ropes=[cast(Rope, _Turns(batch))],
        scale=sizes.head_dim**-0.5,
        dtype=sizes.dtype,
        device=CPU,
        softcap=sizes.softcap,
        sinks_N=[None if batch.sinks_N is None else batch.sinks_N.to(sizes.dtype)],
    )


class _Turns:
    """Rotates by a batch's angles."""

    def __init__(self, batch: Batch) -> None:
        self._turns_PH = batch.turns_PH
        self._turns_TH = None if batch.turns_TH is None else batch.turns_TH[batch.slots_T >= 0]

    def cosines_and_sines(self) -> Tensor:
        return self._turns_PH

    def turns(self, positions_T: Tensor) -> Tensor:
        turns_TH = self._turns_PH.index_select(0, positions_T) if self._turns_TH is None else self._turns_TH
        return torch.view_as_complex(turns_TH.unflatten(1, (-1, 2)))[:, None]


def step_of(batch: Batch, is_real_T: Tensor) -> tuple[StepInputs, StepTensors]:
    slots, starts, counts = (
        np.array([getattr(sequence, name) for sequence in batch.sequences], np.int64)
        for name in ("slot", "start", "count")
    )
    tables_SM, positions_T = batch.block_tables_SM.clamp(min=0), batch.positions_T[is_real_T].long()
    step = StepInputs(
        slots=slots,
        counts=counts,
        starts=starts,
        num_decodes=sum(position is not None for position in batch.sizes.tokens),
        token_slots=batch.slots_T[is_real_T].long().numpy(),
        positions=positions_T.numpy(),
        sampled=np.arange(len(slots)),
        sampled_rows=np.cumsum(counts) - 1,
        next_positions=starts + counts,
        draft_ids=None,
        generations=np.zeros_like(slots),
        block_tables=tables_SM.numpy(),
        tables_version=0,
        features=None if batch.ends_T is None else StepFeatures(ends=batch.ends_T[is_real_T].numpy()),
    )
    nothing = torch.empty(0, dtype=torch.int64)
    return step, StepTensors(tables_SM, batch.slots_T[is_real_T], positions_T, nothing, nothing, None)


def native(batch: Batch) -> Outcome:
    """The kernels for CPUs. They don't know padding rows."""
    sizes, real = batch.sizes, batch.slots_T >= 0
    rows = real.cumsum(0) - 1
    sequences = [[each.slot, int(rows[each.first_row]), each.count, each.start] for each in batch.sequences]
    qkv, blocks = batch.qkv_TO[real].contiguous(), native_layout(batch.blocks, sizes)
    none = torch.empty(0, 0, dtype=sizes.dtype)
    out_TX = torch.zeros(len(real), sizes.num_heads * sizes.head_dim, dtype=sizes.dtype)
    out_TX[real] = torch.ops.raycore.attention(
        qkv,
        none if batch.norm_NH is None else batch.norm_NH,
        EPS,
        sizes.norm_offset,
        batch.turns_PH if batch.turns_TH is None else batch.turns_TH[real].contiguous(),
        blocks,
        batch.block_tables_SM,
        torch.tensor(sequences, dtype=torch.int32).view(-1, 4),
        sizes.num_heads,
        sizes.num_kv_heads,
        sizes.block_size,
        sizes.window or 0,
        sizes.head_dim**-0.5,
        sizes.softcap or 0.0,
        torch.empty(0) if batch.sinks_N is None else batch.sinks_N,
        batch.turns_TH is not None,
        torch.empty(0, dtype=torch.int32) if batch.ends_T is None else batch.ends_T[real].contiguous(),
    )
    return Outcome(out_TX, usual_layout(blocks, sizes))


def native_layout(blocks: Tensor, sizes: Sizes) -> Tensor:
    """Keys by pairs of elements, and values by pairs of tokens, in bfloat16. Transposed keys in other dtypes."""
    pair = _pair(sizes)
    keys, values = blocks.view(-1, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim).unbind(1)
    keys = keys.unflatten(3, (-1, pair)).transpose(2, 3).flatten(2)
    values = values.unflatten(2, (-1, pair)).transpose(3, 4).flatten(2)
    return torch.stack([keys, values], 1).view(blocks.shape).clone()


def usual_layout(blocks: Tensor, sizes: Sizes) -> Tensor:
    pair = _pair(sizes)
    size, dim = sizes.block_size, sizes.head_dim
    keys, values = blocks.view(-1, 2, sizes.num_kv_heads, size * dim).unbind(1)
    keys = keys.view(-1, sizes.num_kv_heads, dim // pair, size, pair).transpose(2, 3).flatten(2)
    values = values.view(-1, sizes.num_kv_heads, size // pair, dim, pair).transpose(3, 4).flatten(2)
    return torch.stack([keys, values], 1).view(blocks.shape)


def _pair(sizes: Sizes) -> int:
    return 2 if sizes.dtype == torch.bfloat16 else 1
