"""Mamba-1's recurrence: its definition, and its kernels in plain torch.

Shape suffixes: those of `raycore.state.spec`, M numbers that times are made of, L tokens of a block, and 1 for a
dimension that is broadcast. K are the numbers of a channel's state: all channels are one head, whose values they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from raycore.models.mixers.mamba1 import Mamba1Spec
from raycore.state.recurrence import Recurrence
from raycore.state.spec import StateStep
from raycore.state.torch_recurrence import CHUNK, DECODE_NUMBERS, TorchRecurrence
from raycore.state.torch_step import TorchSteps, by_token, softplus
from raycore.step.memory import FLOAT32_BYTES, INT64_BYTES, StepLimits


@dataclass(slots=True, frozen=True)
class Mamba1Layer:
    """What a layer of Mamba-1 has beside its projections, and its states."""

    conv_CW: Tensor
    """The taps of each channel, the oldest first. In the model's data type."""
    conv_bias_C: Tensor | None
    """Is added to the convolution. In the model's data type."""
    rates_KC: Tensor
    """float32: `-exp(A_log)`. Checkpoints have it the other way round."""
    bias_C: Tensor
    """float32: that of times."""
    skip_C: Tensor
    """float32: `D`."""
    select: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    """Makes times [T, C], before their bias, B [T, K] and C [T, K] of the convolution's results [T, C], all in the
    model's data type. Ranks that divide channels call it together."""
    conv_states_RCW: Tensor
    """[R, C, W - 1]: the last inputs of the convolution, the oldest first, before its activation."""
    states_RNKH: Tensor
    """float32[R, 1, K, C]."""


class TorchMamba1:
    """Computes Mamba-1's recurrence.

    `batch_invariant`: make the bits of each token's result independent of the step's other sequences, and of how its
    prompt is divided into steps.
    """

    def __init__(self, shape: Mamba1Spec, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant
        self._steps = TorchSteps(shape.conv_size)

    def __call__(self, layer: Mamba1Layer, x_TC: Tensor, step: StateStep) -> Tensor:
        """Compute one layer, and write the states. Returns [T, C] in the data type of `x_TC`."""
        invariant, indexes = self._batch_invariant, self._steps.of(step, x_TC)
        y_TC = indexes.convolve(x_TC, layer.conv_CW, layer.conv_bias_C, layer.conv_states_RCW)
        y_TC = by_token(functional.silu, y_TC, batch_invariant=invariant)
        times_TC, b_TK, c_TK = (each.float() for each in layer.select(y_TC.to(x_TC.dtype)))
        times_TC = by_token(softplus, times_TC + layer.bias_C, batch_invariant=invariant)
        inputs_T1 = (each[:, None] for each in (c_TK, b_TK, y_TC * times_TC, times_TC))
        rates_KC = layer.rates_KC
        compute = TorchRecurrence(partial(_update, rates_KC), partial(_update_by_chunk, rates_KC), invariant)
        out_T1C = compute(layer.states_RNKH, indexes, tuple(inputs_T1))
        return out_T1C[:, 0].add_(y_TC.mul_(layer.skip_C)).to(x_TC.dtype)


class Mamba1Recurrence(Recurrence):
    """Computes layers of Mamba-1.

    x_TC goes through the convolution and SiLU, which gives x. Times dt, B and C are linear functions of it. For each
    token, with a state S of K numbers for each channel, which begins as zeros,

        dt ← softplus(dt + bias)
        S ← exp(rates · dt) · S + B · dt · x
        output = S · C + skip · x

    in float32. Source: Mamba (https://arxiv.org/abs/2312.00752), algorithm 2.
    """

    _own: Mamba1Spec
    layer = Mamba1Layer
    by_torch = TorchMamba1

    def step_bytes(self, limits: StepLimits, hidden_size: int, item_size: int, *, is_native: bool) -> int:
        own, num_seqs = self._own, min(limits.num_seqs, limits.num_tokens)
        channels, selected = own.num_channels, sum(own.selected_sizes)
        # the projection's outputs, the inputs twice, those of one tap, times, and the result
        in_dtype = 3 * hidden_size + 9 * channels + 3 * selected
        of_token = in_dtype * item_size + (5 * channels + selected) * FLOAT32_BYTES + own.conv_size * INT64_BYTES
        # decays and states: of a copy of each decode's, or of the tokens of a block
        state = own.state_size * channels
        most = max(state, DECODE_NUMBERS)
        decodes = 3 * min(num_seqs * state, most) * FLOAT32_BYTES + num_seqs * 4 * channels * own.conv_size * item_size
        block = 2 * (min(min(CHUNK, limits.num_tokens) * state, most) + state) * FLOAT32_BYTES
        return limits.num_tokens * of_token + max(decodes, block)


def _update(
    rates_KC: Tensor, state_NKC: Tensor, c_NK: Tensor, b_NK: Tensor, inputs_NC: Tensor, times_NC: Tensor
) -> Tensor:
    """Update some sequences' states by one token each. Returns the results [N, C].

    `inputs_NC`: the products of x and the times.
    """
    state_NKC.mul_((times_NC[:, None] * rates_KC).exp_()).addcmul_(b_NK[:, :, None], inputs_NC[:, None])
    return torch.bmm(c_NK[:, None], state_NKC)[:, 0]


def _update_by_chunk(rates_KC: Tensor, state_1KC: Tensor, *inputs_1L: Tensor) -> Tensor:
    """Update a sequence's state by the tokens of a chunk, block after block. Returns the results [1, L, C]."""
    size = max(1, DECODE_NUMBERS // rates_KC.numel())
    blocks = zip(*(torch.split(each_1L[0], size) for each_1L in inputs_1L), strict=True)
    return torch.cat([_update_by_block(rates_KC, state_1KC[0], *block) for block in blocks])[None]


def _update_by_block(
    rates_KC: Tensor, state_KC: Tensor, c_LK: Tensor, b_LK: Tensor, inputs_LC: Tensor, times_LC: Tensor
) -> Tensor:
    """Update a sequence's state by the tokens of a block. Returns the results [L, C].

    Only the sum of what is left of a state and of what is added to it is computed token by token. Decays can't be
    divided out of sums over tokens, because their products may be too small for that.
    """
    decays_LKC = (times_LC[:, None] * rates_KC).exp_()
    states_LKC = b_LK[:, :, None] * inputs_LC[:, None]
    before_KC = state_KC
    for decay_KC, after_KC in zip(decays_LKC.unbind(), states_LKC.unbind(), strict=True):
        before_KC = after_KC.addcmul_(before_KC, decay_KC)
    state_KC.copy_(before_KC)
    return torch.bmm(c_LK[:, None], states_LKC)[:, 0]
