"""What every implementation of latent attention promises, checked against a formula in float64.

A `LatentBatch` is the input of one step in one layer: the rows of its tokens, and the cache before it. An
implementation is tested through a function that takes a batch and returns an `Outcome`. It must not change the batch.

The cache's layout is that of `LatentTensors`. Whatever no token may read is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import cast

import numpy as np
import torch
from hypothesis import strategies
from native_kernels import assert_near, randn
from torch import Tensor

from raycore.attention.latent import TorchLatentAttention
from raycore.attention.latent_tensors import LatentTensors
from raycore.attention.native_latent import NativeLatentAttention
from raycore.attention.spec import Attention, AttentionSpec
from raycore.layers.rope import Rope
from raycore.models.mixers.spec import HeadShape
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors

CPU = torch.device("cpu")
EPS = 1e-6


@dataclass(frozen=True)
class LatentSizes:
    """What a batch is made of. Hypothesis prints it when a test fails."""

    seed: int = 0
    dtype: torch.dtype = torch.float32
    num_heads: int = 4
    rank: int = 32
    rotated_dim: int = 8
    block_size: int = 16
    chunks: tuple[tuple[int, int], ...] = ()
    """The position of the first token, and the number of tokens, of each sequence. Decodes come first."""

    @property
    def width(self) -> int:
        return self.rank + self.rotated_dim

    @property
    def scale(self) -> float:
        return 0.7 * self.width**-0.5


@dataclass(frozen=True)
class Outcome:
    """What an implementation computed."""

    out_TNR: Tensor
    rows_XW: Tensor
    """The cache after the step."""


@dataclass
class LatentBatch:
    """The input of one step in one layer. Tensors are on the CPU."""

    sizes: LatentSizes
    fused_TNW: Tensor = field(init=False)
    norm_R: Tensor = field(init=False)
    turns_PX: Tensor = field(init=False)
    tables_SM: Tensor = field(init=False)
    """Slot 0 is unused. What lies behind a sequence's blocks must not be read."""
    rows_XW: Tensor = field(init=False)

    def __post_init__(self) -> None:
        sizes = self.sizes
        ends = [start + count for start, count in sizes.chunks]
        num_tokens, size = sum(count for _, count in sizes.chunks), sizes.block_size
        self.fused_TNW = randn(sizes.seed, num_tokens, sizes.num_heads + 1, sizes.width).to(sizes.dtype)
        self.norm_R = (1 + randn(sizes.seed + 1, sizes.rank) / 4).to(sizes.dtype)
        angles_PC = randn(sizes.seed + 2, max(ends, default=0) + 1, sizes.rotated_dim // 2) * 3
        self.turns_PX = torch.stack([angles_PC.cos(), angles_PC.sin()], -1).flatten(1)
        num_blocks = [-(-end // size) for end in ends]
        order = torch.randperm(sum(num_blocks) + 1, generator=torch.Generator().manual_seed(sizes.seed)).int()
        self.tables_SM = torch.full((len(ends) + 1, max(num_blocks, default=0) + 1), -1, dtype=torch.int32)
        self.rows_XW = torch.full((len(order) * size, sizes.width), math.nan, dtype=sizes.dtype)
        for index, (own, block_ids_M) in enumerate(zip(num_blocks, order[:-1].split(num_blocks), strict=True)):
            self.tables_SM[index + 1, :own] = block_ids_M
            self.rows_XW[self.places(index, range(sizes.chunks[index][0]))] = self.earlier(index)

    def places(self, index: int, positions: range) -> Tensor:
        """Where a sequence's tokens at these positions are in the cache."""
        positions_T, size = torch.arange(positions.start, positions.stop), self.sizes.block_size
        return self.tables_SM[index + 1].long()[positions_T // size] * size + positions_T % size

    def earlier(self, index: int) -> Tensor:
        """The keys before a sequence's first row."""
        shape = self.sizes.chunks[index][0], self.sizes.width
        return randn(self.sizes.seed + 3 + index, *shape).to(self.sizes.dtype)

    @cached_property
    def expected(self) -> Outcome:
        """The outcome by formula, in float64. Queries and keys are rounded to the batch's dtype."""
        sizes, rank = self.sizes, self.sizes.rank
        x_TNW, rows_XW = self.fused_TNW.double().clone(), self.rows_XW.double()
        positions_T = torch.cat([torch.arange(start, start + count) for start, count in sizes.chunks])
        latents_TR = x_TNW[:, -1, :rank]
        latents_TR = latents_TR / (latents_TR.square().mean(-1, keepdim=True) + EPS).sqrt() * self.norm_R.double()
        x_TNW[:, -1, :rank] = latents_TR
        turns_T1C = torch.view_as_complex(self.turns_PX.double().unflatten(1, (-1, 2)))[positions_T][:, None]
        rotated_TNC = torch.view_as_complex(x_TNW[..., rank:].unflatten(2, (-1, 2)).contiguous()) * turns_T1C
        x_TNW[..., rank:] = torch.view_as_real(rotated_TNC).flatten(2)
        x_TNW = x_TNW.to(sizes.dtype).double()
        out_TNR = torch.zeros(len(x_TNW), sizes.num_heads, rank, dtype=torch.float64)
        first = 0
        for index, (start, count) in enumerate(sizes.chunks):
            own = slice(first, first + count)
            rows_XW[self.places(index, range(start, start + count))] = x_TNW[own, -1]
            keys_LW = torch.cat([self.earlier(index).double(), x_TNW[own, -1]])
            scores_TNL = torch.einsum("tnw,lw->tnl", x_TNW[own, :-1], keys_LW) * sizes.scale
            is_seen_TL = torch.arange(len(keys_LW)) <= torch.arange(start, start + count)[:, None]
            weights_TNL = scores_TNL.masked_fill(~is_seen_TL[:, None], -math.inf).softmax(-1)
            out_TNR[own] = weights_TNL @ keys_LW[:, :rank]
            first += count
        return Outcome(out_TNR, rows_XW)

    def check(self, outcome: Outcome) -> None:
        """Fails if the outcome isn't the expected one."""
        expected = self.expected
        is_stored = self.rows_XW.isnan() & ~expected.rows_XW.isnan()
        rows = expected.rows_XW[is_stored]
        assert_near(outcome.rows_XW[is_stored], rows, 2 * rows.abs() + 1)
        others = outcome.rows_XW[~is_stored], self.rows_XW[~is_stored]
        assert torch.equal(*(each.view(torch.uint8) for each in others)), "other places of the cache have changed"
        # a number that is just between two others may be rounded to either, which moves a score by its product
        sizes = self.sizes
        largest = float(max(self.fused_TNW.abs().max(), expected.rows_XW.nan_to_num().abs().max()))
        assert_near(outcome.out_TNR, expected.out_TNR, 4 * largest * (1 + largest**2 * sizes.scale))

    def step(self, device: torch.device = CPU) -> tuple[StepInputs, StepTensors]:
        """The step as implementations get it."""
        slots = np.arange(1, len(self.sizes.chunks) + 1)
        starts, counts = (np.array(each, np.int64) for each in zip(*self.sizes.chunks, strict=True))
        positions = np.concatenate([np.arange(start, start + count) for start, count in self.sizes.chunks])
        step = StepInputs(
            slots=slots,
            counts=counts,
            starts=starts,
            num_decodes=int(np.cumprod(counts == 1).sum()),
            token_slots=np.repeat(slots, counts),
            positions=positions,
            sampled=np.arange(len(slots)),
            sampled_rows=np.cumsum(counts) - 1,
            next_positions=starts + counts,
            draft_ids=None,
            generations=np.zeros_like(slots),
            block_tables=self.tables_SM.numpy(),
            tables_version=0,
        )
        nothing = torch.empty(0, dtype=torch.int64)
        slots_T = torch.as_tensor(np.repeat(slots, counts)).int().to(device)
        positions_T, tables_SM = torch.as_tensor(positions).to(device), self.tables_SM.to(device)
        return step, StepTensors(tables_SM, slots_T, positions_T, nothing, nothing, None)


class _Turns:
    """Rotates by a batch's angles."""

    def __init__(self, turns_PX: Tensor) -> None:
        self._turns_PX = turns_PX

    def turns(self, positions_T: Tensor) -> Tensor:
        return torch.view_as_complex(self._turns_PX.unflatten(1, (-1, 2)))[positions_T][:, None]

    def cosines_and_sines(self) -> Tensor:
        return self._turns_PX


def spec_of(batch: LatentBatch, device: torch.device = CPU) -> AttentionSpec:
    """What implementations know of the model."""
    sizes = batch.sizes
    return AttentionSpec(
        heads=HeadShape(sizes.num_heads, 1, sizes.width, sizes.rank),
        windows=[None],
        qk_norms_NH=[batch.norm_R[None].to(device)],
        norm_eps=EPS,
        norm_offset=0.0,
        ropes=[cast(Rope, _Turns(batch.turns_PX.to(device)))],
        scale=sizes.scale,
        dtype=sizes.dtype,
        device=device,
        softcap=None,
        sinks_N=[None],
    )


def outcome_of(
    make: Callable[[AttentionSpec, LatentTensors], Attention], batch: LatentBatch, device: torch.device = CPU
) -> Outcome:
    """What the implementation that `make` returns computes."""
    sizes = batch.sizes
    num_blocks = len(batch.rows_XW) // sizes.block_size
    kv = LatentTensors(1, num_blocks, sizes.width, sizes.block_size, sizes.dtype, device)
    kv.rows[0].copy_(batch.rows_XW)
    attention = make(spec_of(batch, device), kv)
    attention.begin(*batch.step(device))
    out_TX = attention(0, batch.fused_TNW.flatten(1).to(device, copy=True))
    return Outcome(out_TX.view(len(out_TX), sizes.num_heads, -1).cpu(), kv.rows[0].cpu())


def plain_torch(batch: LatentBatch) -> Outcome:
    """Plain torch."""
    return outcome_of(TorchLatentAttention, batch)


def batch_invariant(batch: LatentBatch) -> Outcome:
    """Plain torch whose bits don't depend on the batch."""
    return outcome_of(lambda spec, kv: TorchLatentAttention(spec, kv, batch_invariant=True), batch)


def native(batch: LatentBatch) -> Outcome:
    """The kernels for CPUs."""
    return outcome_of(NativeLatentAttention, batch)


def latent_sizes(dtypes: list[torch.dtype], longest: int, most_rows: int) -> strategies.SearchStrategy[LatentSizes]:
    """Sizes of batches with sequences up to `longest` tokens, and up to `most_rows` rows in a chunk."""
    position = strategies.integers(0, longest - 1) | strategies.integers(0, 20)
    decode = strategies.tuples(position, strategies.just(1))
    chunk = strategies.tuples(position | strategies.just(0), strategies.integers(1, most_rows))
    return strategies.builds(
        LatentSizes,
        seed=strategies.integers(0, 1 << 32),
        dtype=strategies.sampled_from(dtypes),
        num_heads=strategies.sampled_from([1, 2, 3, 16, 20]),
        rank=strategies.sampled_from([8, 24, 32, 50, 128, 512]),
        rotated_dim=strategies.sampled_from([2, 8, 14, 64]),
        block_size=strategies.sampled_from([1, 8, 16, 48, 256]),
        chunks=strategies.tuples(strategies.lists(decode, max_size=3), strategies.lists(chunk, max_size=2))
        .map(lambda parts: tuple(parts[0] + parts[1]))
        .filter(bool),
    )
