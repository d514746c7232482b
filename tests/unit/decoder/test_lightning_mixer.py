"""Lightning attention beside its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from configs import SPEC
from msgspec.structs import replace
from small_model import make_operations
from torch import Tensor
from torch.nn.functional import silu

from raycore.decoder.lightning_mixer import LightningMixer, LightningWeights
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.lightning import LightningSpec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import SplitExperts
from raycore.state.recurrence import recurrence_of
from raycore.state.spec import FROM_ZERO, StateStep
from raycore.state.state_layers import empty_states

NUM_HEADS, DIM, HIDDEN = 4, 6, SPEC.hidden_size
LIGHTNING = LightningSpec([True] * 3, NUM_HEADS, DIM, DIM)
MODEL = replace(SPEC, state=LIGHTNING, num_layers=3, rotations=[None] * 3, layer_windows=[None] * 3)


def weights() -> LightningWeights:
    torch.manual_seed(2)
    size = NUM_HEADS * DIM
    shapes = (3 * size, HIDDEN), (size, HIDDEN), (size,), (HIDDEN, size)
    return LightningWeights(*(torch.randn(shape) / 3 for shape in shapes))


def mixer_at(layer: int) -> LightningMixer:
    ranks = TensorParallel()
    return LightningMixer(
        PartPlace(MODEL, layer, layer, ranks, SplitExperts(ranks), make_operations("torch")), weights()
    )


class States:
    """Computes one sequence from its begin. Implements `Attention`."""

    def __init__(self, mixer: LightningMixer) -> None:
        names = [each.field for each in LIGHTNING.state(1)]
        states = empty_states(1, 1, LIGHTNING.state(1), torch.float32, torch.device("cpu"))
        recurrence = recurrence_of(LIGHTNING, 1)
        own: dict[str, Any] = dict(zip(names, (each[0] for each in states), strict=True))
        self._layer = recurrence.layer(**mixer.constants.of_state, **own)
        self._kernels = recurrence.kernels("torch", batch_invariant=False)

    def begin(self, step: Any, tensors: Any) -> None: ...

    def __call__(self, layer: int, x_TX: Tensor) -> Tensor:
        sequences_n4 = np.array([[0, len(x_TX), FROM_ZERO, 0]], np.int32)
        return self._kernels(self._layer, x_TX, StateStep(sequences_n4, 0, np.zeros((0, 3), np.int32)))


@pytest.mark.parametrize("layer", [0, 2])
def test_results_are_those_of_linear_attention_whose_states_decay(layer: int) -> None:
    own, x_TD = weights(), torch.randn(70, HIDDEN)
    q_TNH, k_TNH, v_TNH = silu(x_TD @ own.qkv_ID.t()).view(70, NUM_HEADS, 3, DIM).double().unbind(2)
    slopes_N = torch.tensor([2.0 ** (-8 * head / NUM_HEADS) for head in range(1, NUM_HEADS + 1)]).double()
    slopes_N *= 1 - layer / (2 + 1e-5) + 1e-5
    state_NHH, out_TNH = torch.zeros(NUM_HEADS, DIM, DIM).double(), torch.empty_like(q_TNH)
    for token in range(70):
        state_NHH = state_NHH * (-slopes_N).exp()[:, None, None] + k_TNH[token][:, :, None] * v_TNH[token][:, None]
        out_TNH[token] = torch.einsum("nkh,nk->nh", state_NHH, q_TNH[token])
    out_TO = out_TNH.flatten(1)
    expected_TO = out_TO / (out_TO.square().mean(1, keepdim=True) + 1e-6).sqrt() * own.norm_O
    expected_TO *= (x_TD @ own.gate_OD.t()).sigmoid()
    mixer = mixer_at(layer)
    torch.testing.assert_close(mixer(x_TD, States(mixer)), expected_TO.float(), atol=1e-4, rtol=1e-4)


def test_weights_are_those_that_it_was_made_of() -> None:
    made, expected = mixer_at(0).weights(), weights()
    for (name, found), (_, own) in zip(made.named(), expected.named(), strict=True):
        assert torch.equal(found, own), name  # pyright: ignore
