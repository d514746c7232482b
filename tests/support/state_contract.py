"""What every implementation of layers that keep a state promises, checked against their definitions in float64.

A `Rule` defines a kind of layer: `delta_contract` and `mamba2_contract` have one each. A `Batch` is the input of one
step in one layer: the rows of its tokens, and the states before it. `Batch.outcome` has an implementation compute it.
Rows of states that no sequence reads are NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from hypothesis import strategies
from native_kernels import ROUNDING, randn
from torch import Tensor
from torch.nn import functional

from raycore.state.spec import FROM_ZERO, StateStep

Make = Callable[[Any], Callable[[Any, Tensor, StateStep], Tensor]]
"""Makes an implementation for a shape."""
CPU = torch.device("cpu")


class Rule(Protocol):
    """The definition of a kind of layer."""

    def shape(self, sizes: Sizes) -> Any: ...

    def width(self, shape: Any) -> int:
        """Return the numbers of each token."""
        ...

    def layer(self, sizes: Sizes, shape: Any, conv_states_RCW: Tensor, states_RNKH: Tensor) -> Any:
        """Return a layer with random numbers."""
        ...

    def one_token(
        self, shape: Any, layer: Any, conv_CW: Tensor, state_NKH: Tensor, x_X: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states after one more token, and its result."""
        ...


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
    saves_in_place: bool = False
    """Whether the first save does, as after drafts that were wrong. Then no other reads that one either."""


@dataclass(frozen=True)
class Sizes:
    """What a batch is made of. Hypothesis prints it when a test fails."""

    rule: Rule
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
    has_options: bool = False
    """Whether the layer has what it need not have."""

    @cached_property
    def shape(self) -> Any:
        return self.rule.shape(self)

    @property
    def num_v_heads(self) -> int:
        return self.num_k_heads * self.group


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
    layer: Any = field(init=False)
    x_TX: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.step, num_rows = self._rows()
        self._make_layer(num_rows)

    def _rows(self) -> tuple[StateStep, int]:
        """The step, with rows in a random order, and their number."""
        sequences = self.sizes.sequences
        readers = [each.parent for each in sequences if each.parent is not None]
        replaced = [each.parent for each in sequences if each.is_in_place or each.saves_in_place]
        assert all(readers.count(each) <= 1 for each in replaced), "a state is read that another sequence replaces"
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
            if each.saves_in_place:
                saves_S3[-len(each.saves)][2] = read
            first += each.num_tokens
        num_decodes = sum(each.num_tokens == 1 for each in sequences)
        step = StateStep(
            np.array(rows_n4, np.int32).reshape(-1, 4), num_decodes, np.array(saves_S3, np.int32).reshape(-1, 3)
        )
        return step, num_rows

    def _make_layer(self, num_rows: int) -> None:
        sizes, shape = self.sizes, self.sizes.shape
        conv_shape = num_rows, shape.num_channels, shape.conv_size - 1
        state_shape = num_rows, sizes.num_v_heads, shape.k_dim, shape.v_dim
        conv_states_RCW = torch.full(conv_shape, math.nan, dtype=sizes.dtype)
        states_RNKH = torch.full(state_shape, math.nan)
        conv_states_RCW[self.parents] = randn(sizes.seed + 1, *conv_shape)[self.parents].to(sizes.dtype)
        states_RNKH[self.parents] = randn(sizes.seed + 2, *state_shape)[self.parents]
        self.layer = sizes.rule.layer(sizes, shape, conv_states_RCW, states_RNKH)
        num_tokens = int(self.step.sequences_n4[:, 1].sum())
        self.x_TX = randn(sizes.seed + 6, num_tokens, sizes.rule.width(shape)).to(sizes.dtype)

    def layer_on(self, device: torch.device) -> Any:
        """A copy of the layer."""
        given = {each.name: getattr(self.layer, each.name) for each in fields(self.layer)}
        return type(self.layer)(
            **{name: None if each is None else each.to(device, copy=True) for name, each in given.items()}
        )

    def outcome(self, make: Make, device: torch.device = CPU) -> Outcome:
        """What an implementation makes of the batch, which stays as it is."""
        layer = self.layer_on(device)
        out_TX = make(self.sizes.shape)(layer, self.x_TX.to(device, copy=True), self.step)
        return Outcome(out_TX.cpu(), layer.conv_states_RCW.cpu(), layer.states_RNKH.cpu())

    @cached_property
    def expected(self) -> Outcome:
        """The outcome by definition, in float64."""
        conv_states_RCW, states_RNKH = self.layer.conv_states_RCW.double(), self.layer.states_RNKH.double()
        new_conv_states, new_states = conv_states_RCW.clone(), states_RNKH.clone()
        outs = [torch.empty(0, self.sizes.num_v_heads * self.sizes.v_dim, dtype=torch.float64)]
        saves = {(sequence, count): row for sequence, count, row in self.step.saves_S3.tolist()}
        for index, (first, count, read, write) in enumerate(self.step.sequences_n4.tolist()):
            saves[index, count] = write
            conv_CW, state_NKH = conv_states_RCW[read], states_RNKH[read]
            if read == FROM_ZERO:
                conv_CW, state_NKH = torch.zeros_like(conv_CW), torch.zeros_like(state_NKH)
            for token in range(count):
                x_X = self.x_TX[first + token].double()
                conv_CW, state_NKH, out_X = self.sizes.rule.one_token(
                    self.sizes.shape, self.layer, conv_CW, state_NKH, x_X
                )
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


def convolved(layer: Any, conv_CW: Tensor, x_X: Tensor) -> tuple[Tensor, Tensor]:
    """The convolution's new state, and its result after SiLU, by definition."""
    inputs_CW = torch.cat([conv_CW, x_X[: len(conv_CW), None]], 1)
    y_C = (inputs_CW * layer.conv_CW.double()).sum(1)
    if (bias_C := getattr(layer, "conv_bias_C", None)) is not None:
        y_C += bias_C.double()
    return inputs_CW[:, 1:], functional.silu(y_C)


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


def sizes(rule: Rule, dtypes: list[torch.dtype], longest: int, largest_dim: int) -> strategies.SearchStrategy[Sizes]:
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
        rule=strategies.just(rule),
        sequences=sequences,
        seed=strategies.integers(0, 1 << 31),
        dtype=strategies.sampled_from(dtypes),
        num_k_heads=strategies.integers(1, 3),
        group=strategies.integers(1, 3),
        k_dim=dims,
        v_dim=dims,
        conv_size=strategies.integers(2, 4),
        decay=strategies.sampled_from([-3.0, 0.0, 0.0, 5.0]),
        has_options=strategies.booleans(),
    )


def _in_place(sequences: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    """Sequences that read a state that no other reads write it in its place."""
    parents = [each.parent for each in sequences]
    return tuple(replace(each, is_in_place=parents.count(each.parent) == 1) for each in sequences)


MIXED = (
    Sequence(1),
    Sequence(1, 0),
    Sequence(1, 0),
    Sequence(1, 1, is_in_place=True),
    Sequence(70, 0, (1, 6, 64)),
    Sequence(5, saves=(1, 2, 3, 4)),
    Sequence(3, 2, (2,), is_in_place=True),
    Sequence(4, 3, (1, 2, 3), saves_in_place=True),
)
"""Sequences that begin, that read one state, and that write or save where they read, with and without saves."""


def twice(sequences: tuple[Sequence, ...]) -> tuple[Sequence, ...]:
    """The sequences, and as many more that read other states."""
    num_parents = max((1 + each.parent for each in sequences if each.parent is not None), default=0)
    others = (replace(each, parent=None if each.parent is None else each.parent + num_parents) for each in sequences)
    return tuple(sorted((*sequences, *others), key=lambda each: each.num_tokens > 1))


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
    alone.layer = batch.layer
    alone.x_TX = batch.x_TX[first : first + count]
    alone.step = StateStep(np.array([[0, count, read, write]], np.int32), int(count == 1), np.zeros((0, 3), np.int32))
    return alone


def _in_two_steps(alone: Batch, cut: int, make: Make, device: torch.device) -> Outcome:
    _, count, read, write = alone.step.sequences_n4[0].tolist()
    kernels, layer, outs = make(alone.sizes.shape), alone.layer_on(device), []
    for begin, end, row in ((0, cut, read), (cut, count, write)):
        rows = np.array([[0, end - begin, row, write]], np.int32)
        step = StateStep(rows, int(end - begin == 1), np.zeros((0, 3), np.int32))
        outs.append(kernels(layer, alone.x_TX[begin:end].to(device, copy=True), step).cpu())
    return Outcome(torch.cat(outs), layer.conv_states_RCW.cpu(), layer.states_RNKH.cpu())


def _assert_sequence_equal(found: Outcome, whole: Outcome, rows: slice, row: int) -> None:
    assert torch.equal(found.out_TX, whole.out_TX[rows])
    assert torch.equal(found.states_RNKH[row], whole.states_RNKH[row])
    assert torch.equal(found.conv_states_RCW[row], whole.conv_states_RCW[row])
