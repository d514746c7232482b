"""Layers of a new kind need no more than a spec, what the kernels know of a layer, and kernels in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from raycore.models.layer_part import ROWS, PartTensor
from raycore.models.mixers.spec import StateTensor
from raycore.models.mixers.state import MatrixMixer
from raycore.models.rows import divided
from raycore.state.recurrence import MatrixRecurrence
from raycore.state.spec import FROM_ZERO, StateStep
from raycore.state.torch_recurrence import TorchRecurrence, add_products, add_products_by_chunk
from raycore.state.torch_step import TorchSteps
from raycore.step.memory import StepLimits

STEP = StateStep(
    sequences_n4=np.array([[0, 1, 2, 2], [1, 1, FROM_ZERO, 3], [2, 70, 4, 5]], np.int32),
    num_decodes=2,
    saves_S3=np.array([[2, 5, 0], [2, 64, 1]], np.int32),
)


class FadingSpec(MatrixMixer, frozen=True):
    """Sums of products that fade at a rate of each head, without a convolution."""

    @property
    def num_channels(self) -> int:
        return 2 * self.num_v_heads * self.k_dim + self.num_values

    def of_rank(self, tp_size: int) -> FadingSpec:
        return msgspec.structs.replace(self, num_v_heads=self.num_v_heads // tp_size)

    def state(self, tp_size: int) -> tuple[StateTensor, ...]:
        return super().state(tp_size)[1:]


@dataclass
class FadingLayer:
    rates_N: Tensor
    states_RNKH: Tensor


class TorchFading:
    def __init__(self, own: FadingSpec, *, batch_invariant: bool = False) -> None:
        self._own = own
        self._steps = TorchSteps()
        self._compute = TorchRecurrence(add_products, add_products_by_chunk, batch_invariant)

    def __call__(self, layer: FadingLayer, x_TX: Tensor, step: StateStep) -> Tensor:
        own = self._own
        sizes = [own.k_dim, own.k_dim, own.v_dim]
        q_TNK, k_TNK, v_TNH = x_TX.view(len(x_TX), own.num_v_heads, -1).split(sizes, 2)
        inputs_TN = q_TNK, k_TNK, v_TNH, -layer.rates_N.expand(len(x_TX), -1)
        return self._compute(layer.states_RNKH, self._steps.of(step, x_TX), inputs_TN).flatten(1)


class FadingRecurrence(MatrixRecurrence):
    layer = FadingLayer
    by_torch = TorchFading


SPEC = FadingSpec([True], num_v_heads=4, k_dim=6, v_dim=5, conv_size=1)


def by_definition(layer: FadingLayer, x_TX: Tensor) -> tuple[Tensor, Tensor]:
    """The results, and the states after the step."""
    states_RNKH, found = layer.states_RNKH.clone(), torch.zeros(len(x_TX), 2, 5)
    saves = {(sequence, count): row for sequence, count, row in STEP.saves_S3.tolist()}
    for sequence, (first, count, read, write) in enumerate(STEP.sequences_n4.tolist()):
        state_NKH = torch.zeros(2, 6, 5) if read == FROM_ZERO else layer.states_RNKH[read].clone()
        for token in range(count):
            q_NK, k_NK, v_NH = x_TX[first + token].view(2, -1).split([6, 6, 5], 1)
            state_NKH = state_NKH * (-layer.rates_N).exp()[:, None, None] + k_NK[:, :, None] * v_NH[:, None]
            found[first + token] = torch.einsum("nkh,nk->nh", state_NKH, q_NK)
            row = saves.get((sequence, token + 1), write if token == count - 1 else None)
            if row is not None:
                states_RNKH[row] = state_NKH
    return found.flatten(1), states_RNKH


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_states_without_a_convolution_follow_their_definition(batch_invariant: bool) -> None:
    recurrence = FadingRecurrence(SPEC, 2)
    generator = torch.Generator().manual_seed(3)
    rows = (torch.empty(6, *tensor.shape).normal_(generator=generator) for tensor in SPEC.state(2))
    layer = recurrence.layer(torch.tensor([0.1, 1.5]), *rows)
    x_TX = torch.empty(72, 2 * 17).normal_(generator=generator)
    out_TX, states_RNKH = by_definition(layer, x_TX)
    compute: Any = recurrence.kernels(recurrence.backend("native"), batch_invariant=batch_invariant)
    torch.testing.assert_close(compute(layer, x_TX, STEP), out_TX, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.states_RNKH, states_RNKH, atol=1e-4, rtol=1e-4)


def test_plain_torch_computes_what_has_no_other_kernels() -> None:
    recurrence = FadingRecurrence(SPEC, 1)
    assert {recurrence.backend("native"), recurrence.backend("triton"), recurrence.backend("torch")} == {"torch"}
    limits = StepLimits(num_tokens=64, num_seqs=8, max_model_len=128, block_size=16)
    assert recurrence.step_bytes(limits, 64, 2, is_native=False) > 8 * 4 * 6 * 5 * 4


@pytest.mark.parametrize(
    ("shape", "stored", "selected", "row"),
    [
        ((ROWS,), (8,), (slice(4, 8),), ()),
        ((ROWS, 1, 3), (8, 1, 3), (slice(4, 8), 0, slice(None)), (3,)),
        ((1, 1, ROWS, 1), (1, 1, 8, 1), (0, 0, slice(4, 8), 0), ()),
    ],
)
def test_a_tensor_is_kept_without_dimensions_of_one(shape: Any, stored: Any, selected: Any, row: Any) -> None:
    part = divided("decay", 8, 1, 2)
    tensor = PartTensor("decay_N", (part,), shape)
    assert (tensor.stored_shape(part), tensor.selects(part), tensor.row) == (stored, selected, row)
    assert torch.zeros(stored)[selected].shape == (4, *row)
