"""What every implementation of the gated delta rule promises, checked against its definition in float64.

A `Batch` is the input of one step in one layer: the rows of its tokens, and the states before it. `Batch.outcome` has
an implementation compute it. Rows of states that no sequence reads are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from hypothesis import strategies
from kernels import ROUNDING, randn
from torch import Tensor
from torch.nn import functional

from raycore.state.spec import FROM_ZERO, DeltaKernels, DeltaLayer, DeltaShape, StateStep

Make = Callable[[DeltaShape], DeltaKernels]
"""Makes an implementation."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sequence:
    """A sequence of a step."""

    num_tokens: int
    parent: int | None = None
    """Reads the state of this number, which several sequences may have in common. None: it begins."""
    saves: tuple[int, ...] = ()
    """After how many tokens its state is saved."""
    is_in_place: bool = False
    """Whether the state that it writes takes the place of the one that it reads. Then no other reads that one."""


@dataclass(frozen=True)
class Sizes:
    """What a batch is made of. Hypothesis prints it when a test fails."""

    sequences: tuple[Sequence, ...] = (Sequence(1),)
    """Those with one token come first."""
    seed: int = 0
    dtype: torch.dtype = torch.float32
    num_k_heads: int = 1
    group: int = 1
    k_dim: int = 16
    v_dim: int = 16
    conv_size: int = 4
    decay: float = 0.0
    """Is added to the logarithm of the decays. With 5, most tokens wipe out the state."""

    @property
    def shape(self) -> DeltaShape:
        return DeltaShape(self.num_k_heads, self.num_k_heads * self.group, self.k_dim, self.v_dim, self.conv_size)


@dataclass
class Outcome:
    """What an implementation computed."""

    out_TX: Tensor
    conv_states_RCW: Tensor
    states_RNKH: Tensor


@dataclass
class Batch:
    """The input of one step in one layer. Tensors are on the CPU."""

    sizes: Sizes
    step: StateStep = field(init=False)
    layer: DeltaLayer = field(init=False)
    x_TX: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.step, num_rows = self._rows()
        self._make_layer(num_rows)

    def _rows(self) -> tuple[StateStep, int]:
        """The step, with rows in a random order, and their number."""
        sequences = self.sizes.sequences
        num_parents = max((1 + each.parent for each in sequences if each.parent is not None), default=0)
        num_rows = num_parents + sum(1 + len(each.saves) for each in sequences) + 2
        rows = np.random.default_rng(self.sizes.seed).permutation(num_rows).tolist()
        self.parents = [rows.pop() for _ in range(num_parents)]
        rows_n4, saves_S3, first = [], [], 0
        for index, each in enumerate(sequences):
            read = FROM_ZERO if each.parent is None else self.parents[each.parent]
            write = read if each.is_in_place and each.parent is not None else rows.pop()
            rows_n4.append([first, each.num_tokens, read, write])
            saves_S3 += [[index, count, rows.pop()] for count in each.saves]
            first += each.num_tokens
        num_decodes = sum(each.num_tokens == 1 for each in sequences)
        step = StateStep(
            np.array(rows_n4, np.int32).reshape(-1, 4), num_decodes, np.array(saves_S3, np.int32).reshape(-1, 3)
        )
        return step, num_rows

    def _make_layer(self, num_rows: int) -> None:
        sizes, shape = self.sizes, self.sizes.shape
        conv_shape = num_rows, shape.num_channels, shape.conv_size - 1
        state_shape = num_rows, shape.num_v_heads, shape.k_dim, shape.v_dim
        conv_states_RCW = torch.full(conv_shape, math.nan, dtype=sizes.dtype)
        states_RNKH = torch.full(state_shape, math.nan)
        conv_states_RCW[self.parents] = randn(sizes.seed + 1, *conv_shape)[self.parents].to(sizes.dtype)
        states_RNKH[self.parents] = randn(sizes.seed + 2, *state_shape)[self.parents]
        self.layer = DeltaLayer(
            randn(sizes.seed + 3, shape.num_channels, shape.conv_size).to(sizes.dtype),
            randn(sizes.seed + 4, shape.num_v_heads) + sizes.decay,
            randn(sizes.seed + 5, shape.num_v_heads),
            conv_states_RCW,
            states_RNKH,
        )
        num_tokens = int(self.step.sequences_n4[:, 1].sum())
        width = shape.num_channels + 2 * shape.num_v_heads
        self.x_TX = randn(sizes.seed + 6, num_tokens, width).to(sizes.dtype)

    def outcome(self, make: Make, device: torch.device = CPU) -> Outcome:
        """What an implementation makes of the batch, which stays as it is."""
        given = self.layer
        names = ("conv_CW", "decay_N", "bias_N", "conv_states_RCW", "states_RNKH")
        layer = DeltaLayer(*(getattr(given, name).to(device, copy=True) for name in names))
        out_TX = make(self.sizes.shape)(layer, self.x_TX.to(device, copy=True), self.step)
        return Outcome(out_TX.cpu(), layer.conv_states_RCW.cpu(), layer.states_RNKH.cpu())

    @cached_property
    def expected(self) -> Outcome:
        """The outcome by definition, in float64."""
        conv_states_RCW, states_RNKH = self.layer.conv_states_RCW.double(), self.layer.states_RNKH.double()
        new_conv_states, new_states = conv_states_RCW.clone(), states_RNKH.clone()
        outs = [torch.empty(0, self.sizes.shape.num_v_heads * self.sizes.v_dim, dtype=torch.float64)]
        saves = {(sequence, count): row for sequence, count, row in self.step.saves_S3.tolist()}
        for index, (first, count, read, write) in enumerate(self.step.sequences_n4.tolist()):
            saves[index, count] = write
            conv_CW, state_NKH = conv_states_RCW[read], states_RNKH[read]
            if read == FROM_ZERO:
                conv_CW, state_NKH = torch.zeros_like(conv_CW), torch.zeros_like(state_NKH)
            for token in range(count):
                x_X = self.x_TX[first + token].double()
                conv_CW, state_NKH, out_X = one_token(self.sizes.shape, self.layer, conv_CW, state_NKH, x_X)
                outs.append(out_X[None])
                if (row := saves.get((index, token + 1))) is not None:
                    new_conv_states[row], new_states[row] = conv_CW, state_NKH
        return Outcome(torch.cat(outs), new_conv_states, new_states)

    def check(self, outcome: Outcome) -> None:
        """Fails if the outcome isn't the expected one."""
        expected = self.expected
        assert outcome.out_TX.dtype == self.sizes.dtype
        found, wanted = outcome.conv_states_RCW.double(), expected.conv_states_RCW
        assert torch.equal(found.nan_to_num(1e9), wanted.nan_to_num(1e9)), "the convolution's states differ"
        _assert_near(outcome.states_RNKH, expected.states_RNKH, torch.float32)
        _assert_near(outcome.out_TX, expected.out_TX, self.sizes.dtype)


def one_token(
    shape: DeltaShape, layer: DeltaLayer, conv_CW: Tensor, state_NKH: Tensor, x_X: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The states after one more token, and its result, by definition."""
    num_heads, group = shape.num_v_heads, shape.num_v_heads // shape.num_k_heads
    inputs_CW = torch.cat([conv_CW, x_X[: shape.num_channels, None]], 1)
    y_C = functional.silu((inputs_CW * layer.conv_CW.double()).sum(1))
    q_GK, k_GK = y_C[: 2 * shape.num_k_heads * shape.k_dim].view(2, shape.num_k_heads, shape.k_dim)
    q_NK, k_NK = (
        (x_GK / (x_GK.square().sum(1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 0) for x_GK in (q_GK, k_GK)
    )
    v_NH = y_C[2 * shape.num_k_heads * shape.k_dim :].view(num_heads, shape.v_dim)
    b_N, a_N = x_X[shape.num_channels :].view(2, num_heads)
    decays_N = (-layer.decay_N.double().exp() * functional.softplus(a_N + layer.bias_N.double())).exp()
    state_NKH = state_NKH * decays_N[:, None, None]
    change_NH = (v_NH - torch.einsum("nkh,nk->nh", state_NKH, k_NK)) * b_N.sigmoid()[:, None]
    state_NKH = state_NKH + k_NK[:, :, None] * change_NH[:, None]
    return inputs_CW[:, 1:], state_NKH, torch.einsum("nkh,nk->nh", state_NKH, q_NK).flatten() / math.sqrt(shape.k_dim)


def _assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Fails if the two differ by more than rounding, relative to the largest numbers, or have NaN at other places.

    Sums of up to 256 numbers and the products of decays of 200 tokens are rounded in float32.
    """
    assert found.shape == expected.shape
    assert torch.equal(found.isnan(), expected.isnan()), "other numbers are NaN"
    expected = expected.nan_to_num(0.0)
    size = float(expected.abs().max()) if expected.numel() else 0.0
    allowed = ROUNDING[dtype] * expected.abs() + 10 * ROUNDING[torch.float32] * (size + 0.1)
    worst = float(((found.double().nan_to_num(0.0) - expected).abs() - allowed).max()) if expected.numel() else 0.0
    assert worst <= 0, f"off by {worst} more than allowed"


def sizes(dtypes: list[torch.dtype], longest: int, largest_dim: int) -> strategies.SearchStrategy[Sizes]:
    """Sizes of batches with prompts of up to `longest` tokens, and heads of up to `largest_dim` numbers."""
    dims = strategies.sampled_from([dim for dim in (16, 24, 32, 64, 80, 128, 256) if dim <= largest_dim])
    parents = strategies.none() | strategies.integers(0, 2)
    counts = strategies.integers(2, longest) | strategies.integers(2, 8) | strategies.sampled_from([63, 64, 65, 128])

    @strategies.composite
    def prompts(draw: strategies.DrawFn) -> Sequence:
        count = min(draw(counts), longest)
        saves = draw(strategies.sets(strategies.integers(1, count - 1), max_size=5))
        return Sequence(count, draw(parents), tuple(sorted(saves)))

    decodes = strategies.builds(Sequence, strategies.just(1), parents)
    sequences = strategies.builds(
        lambda decodes, prompts: _in_place((*decodes, *prompts)),
        strategies.lists(decodes, max_size=5),
        strategies.lists(prompts(), max_size=3),
    )
    return strategies.builds(
        Sizes,
        sequences=sequences,
        seed=strategies.integers(0, 1 << 31),
        dtype=strategies.sampled_from(dtypes),
        num_k_heads=strategies.integers(1, 3),
        group=strategies.integers(1, 3),
        k_dim=dims,
        v_dim=dims,
        conv_size=strategies.integers(2, 4),
        decay=strategies.sampled_from([-3.0, 0.0, 0.0, 5.0]),
    )


def _in_place(sequences: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    """Sequences that read a state that no other reads write it in its place."""
    parents = [each.parent for each in sequences]
    return tuple(replace(each, is_in_place=parents.count(each.parent) == 1) for each in sequences)


def assert_same_bits(make: Make, sizes: Sizes, device: torch.device = CPU) -> None:
    """Fails if a token's result or state depends on the step's other sequences, or on how a prompt is divided."""
    batch = Batch(sizes)
    whole = batch.outcome(make, device)
    for index, sequence in enumerate(sizes.sequences):
        alone = _of_one(batch, index)
        first, count, _, row = batch.step.sequences_n4[index].tolist()
        rows = slice(first, first + count)
        _assert_sequence_equal(alone.outcome(make, device), whole, rows, row)
        for cut in {1, sequence.num_tokens // 2, sequence.num_tokens - 1} - {0, sequence.num_tokens}:
            _assert_sequence_equal(_in_two_steps(alone, cut, make, device), whole, rows, row)


def _of_one(batch: Batch, index: int) -> Batch:
    """A batch with one of the sequences."""
    alone = Batch(batch.sizes)
    first, count, read, write = batch.step.sequences_n4[index].tolist()
    alone.x_TX = batch.x_TX[first : first + count]
    alone.step = StateStep(np.array([[0, count, read, write]], np.int32), int(count == 1), np.zeros((0, 3), np.int32))
    return alone


def _in_two_steps(alone: Batch, cut: int, make: Make, device: torch.device) -> Outcome:
    _, count, read, write = alone.step.sequences_n4[0].tolist()
    kernels, layer, outs = make(alone.sizes.shape), alone.layer, []
    names = ("conv_CW", "decay_N", "bias_N", "conv_states_RCW", "states_RNKH")
    layer = DeltaLayer(*(getattr(alone.layer, name).to(device, copy=True) for name in names))
    for begin, end, row in ((0, cut, read), (cut, count, write)):
        rows = np.array([[0, end - begin, row, write]], np.int32)
        step = StateStep(rows, int(end - begin == 1), np.zeros((0, 3), np.int32))
        outs.append(kernels(layer, alone.x_TX[begin:end].to(device, copy=True), step).cpu())
    return Outcome(torch.cat(outs), layer.conv_states_RCW.cpu(), layer.states_RNKH.cpu())


def _assert_sequence_equal(found: Outcome, whole: Outcome, rows: slice, row: int) -> None:
    assert torch.equal(found.out_TX, whole.out_TX[rows])
    assert torch.equal(found.states_RNKH[row], whole.states_RNKH[row])
    assert torch.equal(found.conv_states_RCW[row], whole.conv_states_RCW[row])
