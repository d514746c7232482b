"""What plain torch makes of the sequences of a step, once for all layers.

Shape suffixes: those of `raycore.state.spec`, and i rows that are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from raycore.layers.rows import on_one_thread, row_by_row
from raycore.state.spec import FROM_ZERO, StateStep


@dataclass(slots=True, frozen=True)
class Sequence:
    """The tokens of a sequence, and where its states are read and written."""

    read_row: int | None
    """None: it begins with zeros."""
    stretches: list[tuple[int, int, int]]
    """Adjacent tokens among the T, from the first to before the last, and the row that is written after them."""

    def state(self, states_R: Tensor) -> Tensor:
        """Return a new tensor with the state that the sequence begins with."""
        return torch.zeros_like(states_R[0]) if self.read_row is None else states_R[self.read_row].clone()


@dataclass(slots=True, frozen=True)
class TorchStep:
    """The indexes of one step, on the device of the states."""

    step: StateStep
    num_tokens: int
    tokens_n: Tensor
    """The sequences' first tokens."""
    read_rows_n: Tensor
    """Of sequences that begin, any row."""
    begins_n: Tensor
    """Whether sequences begin with zeros."""
    write_rows_n: Tensor
    inputs_WT: Tensor
    """The inputs of a token's convolution, the oldest first: rows of the tokens, then of the states of the sequences,
    W - 1 each, then of a zero."""
    saved_rows_i: Tensor
    """All rows that are written."""
    saved_inputs_Wi: Tensor
    """The inputs, W - 1, that these rows get."""
    sequences: list[Sequence]

    @classmethod
    def of(cls, step: StateStep, num_tokens: int, conv_size: int, device: torch.device) -> TorchStep:
        """Return the indexes of a step with `num_tokens` rows. `conv_size`: taps of a convolution. 1: there is none."""
        first_n, counts_n, read_n, write_n = _columns(step.sequences_n4)
        inputs_WT = _inputs(first_n, counts_n, read_n, num_tokens, conv_size)
        sequence_S, saved_S, saved_rows_S = _columns(step.saves_S3)
        tokens_i = np.concatenate([first_n + counts_n, first_n[sequence_S] + saved_S]) - 1

        def on_device(values: NDArray[np.generic]) -> Tensor:
            return torch.as_tensor(np.ascontiguousarray(values), device=device)

        return cls(
            step,
            num_tokens,
            on_device(first_n),
            on_device(np.maximum(read_n, 0)),
            on_device(read_n == FROM_ZERO),
            on_device(write_n),
            on_device(inputs_WT),
            on_device(np.concatenate([write_n, saved_rows_S])),
            on_device(inputs_WT[1:, tokens_i]),
            list(_sequences(step)),
        )

    def states(self, states_R: Tensor, sequences: slice) -> Tensor:
        """Return a new tensor with the states that some sequences begin with."""
        states_n = states_R.index_select(0, self.read_rows_n[sequences])
        if all(each.read_row is not None for each in self.sequences[sequences]):
            return states_n
        begins_n = self.begins_n[sequences].view(-1, *[1] * (states_R.dim() - 1))
        return states_n.masked_fill_(begins_n, 0.0)

    def convolve(self, x_TC: Tensor, conv_CW: Tensor, bias_C: Tensor | None, conv_states_RCW: Tensor) -> Tensor:
        """Return float32[T, C]: the convolution of a step's tokens. Writes the states.

        The bits of a token's result don't depend on the other tokens.
        """
        earlier_XC = self.states(conv_states_RCW, slice(None)).transpose(1, 2).reshape(-1, x_TC.shape[1])
        inputs_XC = torch.cat([x_TC, earlier_XC, x_TC.new_zeros(1, x_TC.shape[1])])
        y_TC = torch.zeros(x_TC.shape, device=x_TC.device)
        for inputs_T, tap_C in zip(self.inputs_WT, conv_CW.float().T, strict=True):
            # two operations, because torch may fuse one for some elements and not for others
            y_TC += inputs_XC.index_select(0, inputs_T).float() * tap_C
        if bias_C is not None:
            y_TC += bias_C.float()
        saved_WiC = inputs_XC[self.saved_inputs_Wi]
        conv_states_RCW.index_copy_(0, self.saved_rows_i, saved_WiC.permute(1, 2, 0).contiguous())
        return y_TC


class TorchSteps:
    """The indexes of the latest step, so that its layers share them."""

    def __init__(self, conv_size: int = 1) -> None:
        self._conv_size = conv_size
        self._latest: TorchStep | None = None

    def of(self, step: StateStep, x_TX: Tensor) -> TorchStep:
        latest = self._latest
        if latest is None or latest.step is not step or latest.num_tokens != len(x_TX):
            self._latest = latest = TorchStep.of(step, len(x_TX), self._conv_size, x_TX.device)
        return latest


def by_token(function: Callable[[Tensor], Tensor], x_TX: Tensor, *, batch_invariant: bool) -> Tensor:
    """Return the element-wise `function(x_TX)`.

    `batch_invariant`: make the bits of each token's result independent of the other tokens.
    """
    return on_one_thread(row_by_row(function), x_TX) if batch_invariant else function(x_TX)


def softplus(x: Tensor) -> Tensor:
    """Return `log(1 + exp(x))`."""
    return functional.softplus(x)  # pyright: ignore[reportUnknownMemberType]


def _columns(rows: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    return [rows[:, column].astype(np.int64) for column in range(rows.shape[1])]


def _inputs(
    first_n: NDArray[np.int64], counts_n: NDArray[np.int64], read_n: NDArray[np.int64], num_tokens: int, size: int
) -> NDArray[np.int64]:
    """Return `TorchStep.inputs_WT`."""
    num_earlier = size - 1
    zero = num_tokens + num_earlier * len(first_n)
    inputs_WT = np.full((size, num_tokens), zero)
    sequence_t = np.repeat(np.arange(len(first_n)), counts_n)
    index_t = np.arange(len(sequence_t)) - np.repeat(np.cumsum(counts_n) - counts_n, counts_n)
    """Of each sequence's tokens, from 0 on."""
    index_Wt = index_t + np.arange(-num_earlier, 1)[:, None]
    earlier_Wt = np.where(read_n[sequence_t] == FROM_ZERO, zero, num_tokens + num_earlier * (sequence_t + 1) + index_Wt)
    inputs_WT[:, first_n[sequence_t] + index_t] = np.where(index_Wt >= 0, first_n[sequence_t] + index_Wt, earlier_Wt)
    return inputs_WT


def _sequences(step: StateStep) -> Iterator[Sequence]:
    saves: dict[int, list[tuple[int, int]]] = {}
    for sequence, count, row in step.saves_S3.tolist():
        saves.setdefault(sequence, []).append((count, row))
    for sequence, (first, count, read_row, write_row) in enumerate(step.sequences_n4.tolist()):
        stretches: list[tuple[int, int, int]] = []
        begin = first
        for end, row in [*saves.get(sequence, ()), (count, write_row)]:
            stretches.append((begin, first + end, row))
            begin = first + end
        yield Sequence(None if read_row == FROM_ZERO else read_row, stretches)
