"""Checks of `benchmarks/gpu.py`: Triton's recurrences of states against their definitions, with sizes of real models.

Sequences begin or go on from a state, some of them with saves on the way. Shape suffixes are those of
`raycore.state.spec`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gpu.checks import Checks
from gpu.kernels import Sizes, both, near, randn
from raycore.models.mixers.delta import DeltaSpec
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.state.delta import DeltaLayer
from raycore.state.gpu import TritonDelta, TritonMamba2
from raycore.state.mamba2 import Mamba2Layer
from raycore.state.spec import FROM_ZERO, StateStep

QWEN3_NEXT = DeltaSpec([True], 32, k_dim=128, v_dim=128, conv_size=4, num_k_heads=16, is_interleaved=True)
GRANITE4 = Mamba2Spec([True], 48, k_dim=128, v_dim=64, conv_size=4, num_groups=1, has_conv_bias=True)
GROUPS = Mamba2Spec([True], 64, 128, 80, 4, num_groups=8, has_conv_bias=True, least_time=0.01, longest_time=2.0)
SHAPES: dict[str, DeltaSpec | Mamba2Spec] = {
    "gated delta rule": QWEN3_NEXT,
    "Mamba-2": GRANITE4,
    "Mamba-2 with groups and limited times": GROUPS,
}


def check_states(
    checks: Checks, sizes: Sizes | None = None, shapes: dict[str, DeltaSpec | Mamba2Spec] | None = None
) -> None:
    """Compare every recurrence with its definition, and a prompt's bits in one step with those in several."""
    sizes = sizes or Sizes()
    device = torch.device(checks.device)
    for name, shape in (shapes or SHAPES).items():
        case = functools.partial(StateCase, sizes, shape, device)
        checks.run(f"kernels: {name}", lambda case=case: case().check())
        checks.run(f"kernels: {name}, same bits in chunks", lambda case=case: case().check_chunks())


@dataclass(frozen=True)
class Prompt:
    """A sequence of the step. With one token, it is a decode."""

    num_tokens: int
    goes_on: bool
    saves: tuple[int, ...] = ()
    """After how many tokens its state is saved."""


class StateCase:
    """A layer, its states, and the tokens of one step."""

    def __init__(self, sizes: Sizes, shape: DeltaSpec | Mamba2Spec, device: torch.device) -> None:
        self.shape, self.device, self.dtype = shape, device, sizes.dtype
        counts = [count for _, count in sizes.chunks]
        self.prompts = [Prompt(1, index > 0) for index in range(sizes.num_rows)]
        self.prompts += [Prompt(count, start > 0, (1, count // 2)) for start, count in sizes.chunks]
        self.step = _step(self.prompts)
        num_rows = 1 + int(max(self.step.sequences_n4[:, 2:].max(), self.step.saves_S3[:, 2].max()))
        num_tokens = sizes.num_rows + sum(counts)
        heads = shape.num_v_heads
        others = 2 * heads if isinstance(shape, DeltaSpec) else heads
        self.x_TX = randn(0, device, sizes.dtype, num_tokens, shape.num_channels + others)
        conv_CW = randn(1, device, sizes.dtype, shape.num_channels, shape.conv_size)
        conv_states_RCW = randn(2, device, sizes.dtype, num_rows, shape.num_channels, shape.conv_size - 1)
        states_RNKH = randn(3, device, torch.float32, num_rows, heads, shape.k_dim, shape.v_dim)
        decay_N, bias_N, skip_N = (randn(seed, device, torch.float32, heads) for seed in (4, 5, 6))
        decay_N -= 2  # states last for many tokens
        self.layer: DeltaLayer | Mamba2Layer
        self.kernels: Callable[[Any, Tensor, StateStep], Tensor]
        if isinstance(shape, DeltaSpec):
            self.layer = DeltaLayer(conv_CW, decay_N, bias_N, conv_states_RCW, states_RNKH)
            self.kernels = TritonDelta(shape)
        else:
            bias_C = randn(7, device, sizes.dtype, shape.num_channels)
            self.layer = Mamba2Layer(conv_CW, bias_C, decay_N, bias_N, skip_N, conv_states_RCW, states_RNKH)
            self.kernels = TritonMamba2(shape)

    def check(self) -> tuple[bool, str]:
        """Compare results and all states with the definition, in float64."""
        states_RNKH, conv_states_RCW = self.layer.states_RNKH.double(), self.layer.conv_states_RCW.clone()
        out_TX = torch.empty(len(self.x_TX), self.layer.states_RNKH[0, :, 0].numel()).to(self.x_TX).double()
        saves = {(index, count): row for index, count, row in self.step.saves_S3.tolist()}
        for index, (first, count, read, write) in enumerate(self.step.sequences_n4.tolist()):
            rows = {saves[index, after]: after for after in self.prompts[index].saves} | {write: count}
            self._define(first, count, read, rows, states_RNKH, conv_states_RCW, out_TX)
        found_TX = self.kernels(self.layer, self.x_TX, self.step)
        has_same_inputs = torch.equal(self.layer.conv_states_RCW, conv_states_RCW)
        return both(
            near(found_TX, out_TX, float(out_TX.abs().max()) / 16),
            near(self.layer.states_RNKH, states_RNKH, 4 * float(states_RNKH.abs().max())),
            (has_same_inputs, f"{'the' if has_same_inputs else 'other'} inputs of convolutions are kept"),
        )

    def check_chunks(self) -> tuple[bool, str]:
        """Compare bits of the last prompt with those of the same tokens in several steps."""
        states_RNKH, conv_states_RCW = self.layer.states_RNKH.clone(), self.layer.conv_states_RCW.clone()
        found_TX = self.kernels(self.layer, self.x_TX, self.step)
        first, count, read, write = self.step.sequences_n4[-1].tolist()
        state_NKH = self.layer.states_RNKH[write].clone()
        self.layer.states_RNKH.copy_(states_RNKH)
        self.layer.conv_states_RCW.copy_(conv_states_RCW)
        outs: list[Tensor] = []
        cuts = sorted({0, 1, count // 3, count - 1, count})
        for begin, end in itertools.pairwise(cuts):
            row_14 = np.array([[0, end - begin, read if begin == 0 else write, write]], np.int32)
            step = StateStep(row_14, int(end - begin == 1), np.zeros((0, 3), np.int32))
            outs.append(self.kernels(self.layer, self.x_TX[first + begin : first + end], step))
        is_same = torch.equal(torch.cat(outs), found_TX[first : first + count])
        is_same = is_same and torch.equal(self.layer.states_RNKH[write], state_NKH)
        return is_same, f"{count} tokens in {len(outs)} steps have {'the same' if is_same else 'other'} bits"

    def _define(
        self,
        first: int,
        count: int,
        read: int,
        rows: dict[int, int],
        states_RNKH: Tensor,
        conv_states_RCW: Tensor,
        out_TX: Tensor,
    ) -> None:
        """Compute a sequence. `rows`: those that get states, and after how many tokens."""
        shape, own_TX = self.shape, self.x_TX[first : first + count]
        kept_CW = self.layer.conv_states_RCW[read] if read != FROM_ZERO else torch.zeros_like(conv_states_RCW[0])
        inputs_CL = torch.cat([kept_CW, own_TX[:, : shape.num_channels].t()], 1)
        y_TC = torch.einsum("ctw,cw->tc", inputs_CL.double().unfold(1, shape.conv_size, 1), self.layer.conv_CW.double())
        if isinstance(self.layer, Mamba2Layer) and self.layer.conv_bias_C is not None:
            y_TC += self.layer.conv_bias_C.double()
        y_TC = functional.silu(y_TC)
        state_NKH = self.layer.states_RNKH[read].double() if read != FROM_ZERO else torch.zeros_like(states_RNKH[0])
        by_token = self._delta(y_TC, own_TX) if isinstance(shape, DeltaSpec) else self._mamba2(y_TC, own_TX)
        decay_TN, q_TNK, k_TNK, v_TNH, share_TN, skipped_TNH = by_token
        for token in range(count):
            state_NKH = state_NKH * decay_TN[token, :, None, None]
            change_NH = v_TNH[token]
            if isinstance(shape, DeltaSpec):
                change_NH = change_NH - torch.einsum("nkh,nk->nh", state_NKH, k_TNK[token])
            state_NKH = state_NKH + k_TNK[token][:, :, None] * (change_NH * share_TN[token, :, None])[:, None]
            out_NH = torch.einsum("nkh,nk->nh", state_NKH, q_TNK[token]) + skipped_TNH[token]
            out_TX[first + token] = out_NH.flatten()
            for row, after in rows.items():
                if after == token + 1:
                    states_RNKH[row] = state_NKH
                    conv_states_RCW[row] = inputs_CL[:, after : after + shape.conv_size - 1]

    def _delta(self, y_TC: Tensor, x_TX: Tensor) -> tuple[Tensor, ...]:
        shape, layer = self.shape, self.layer
        assert isinstance(shape, DeltaSpec)
        q_TNK, k_TNK = (
            (x_TGK / (x_TGK.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(
                shape.num_v_heads // shape.num_k_heads, 1
            )
            for x_TGK in y_TC[:, : 2 * shape.num_k_heads * shape.k_dim]
            .unflatten(1, (2, shape.num_k_heads, shape.k_dim))
            .unbind(1)
        )
        v_TNH = y_TC[:, 2 * shape.num_k_heads * shape.k_dim :].unflatten(1, (shape.num_v_heads, shape.v_dim))
        b_TN, a_TN = x_TX[:, shape.num_channels :].double().chunk(2, 1)
        time_TN = functional.softplus(a_TN + layer.bias_N.double())
        decay_TN = (-layer.decay_N.double().exp() * time_TN).exp()
        return decay_TN, q_TNK / math.sqrt(shape.k_dim), k_TNK, v_TNH, b_TN.sigmoid(), torch.zeros_like(v_TNH)

    def _mamba2(self, y_TC: Tensor, x_TX: Tensor) -> tuple[Tensor, ...]:
        shape, layer = self.shape, self.layer
        assert isinstance(shape, Mamba2Spec)
        assert isinstance(layer, Mamba2Layer)
        values = shape.num_v_heads * shape.v_dim
        v_TNH = y_TC[:, :values].unflatten(1, (shape.num_v_heads, shape.v_dim))
        by_group = y_TC[:, values:].unflatten(1, (2, shape.num_groups, shape.k_dim))
        k_TNK, q_TNK = by_group.repeat_interleave(shape.num_v_heads // shape.num_groups, 2).unbind(1)
        time_TN = functional.softplus(x_TX[:, shape.num_channels :].double() + layer.bias_N.double())
        time_TN = time_TN.clamp(shape.least_time, shape.longest_time)
        decay_TN = (-layer.decay_N.double().exp() * time_TN).exp()
        return decay_TN, q_TNK, k_TNK, v_TNH, time_TN, v_TNH * layer.skip_N.double()[:, None]


def _step(prompts: Sequence[Prompt]) -> StateStep:
    """Each sequence writes where it reads, and saves go to rows of their own."""
    sequences: list[list[int]] = []
    saves: list[list[int]] = []
    first, next_save = 0, len(prompts)
    for index, prompt in enumerate(prompts):
        sequences.append([first, prompt.num_tokens, index if prompt.goes_on else FROM_ZERO, index])
        for count in prompt.saves:
            saves.append([index, count, next_save])
            next_save += 1
        first += prompt.num_tokens
    num_decodes = sum(prompt.num_tokens == 1 for prompt in prompts)
    return StateStep(np.array(sequences, np.int32), num_decodes, np.array(saves, np.int32).reshape(-1, 3))
