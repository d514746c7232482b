"""Mamba-1 as a mixer, beside transformers' code of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from configs import SPEC
from msgspec.structs import replace
from small_model import make_operations
from torch import Tensor
from transformers import FalconMambaConfig, JambaConfig, MambaConfig
from transformers.models.falcon_mamba.modeling_falcon_mamba import FalconMambaMixer
from transformers.models.jamba.modeling_jamba import JambaMambaMixer
from transformers.models.mamba.modeling_mamba import MambaMixer

from raycore.decoder.mamba1_mixer import Mamba1Mixer
from raycore.layers.part_place import PartPlace
from raycore.models.mixers.mamba1 import Mamba1Spec
from raycore.parallel.tensor_parallel import TensorParallel
from raycore.parts.experts.parallel import SplitExperts
from raycore.state.recurrence import recurrence_of
from raycore.state.spec import FROM_ZERO, StateStep
from raycore.state.state_layers import empty_states
from raycore.weights.loader import RankLayout, has_no_tensor
from raycore.weights.share import WeightShare

HIDDEN, CHANNELS, SIZE, TIMES, TAPS, EPS = SPEC.hidden_size, 40, 6, 5, 3, 1e-2
SIZES = {"hidden_size": HIDDEN, "num_hidden_layers": 1}
OWN = {"state_size": SIZE, "time_step_rank": TIMES, "conv_kernel": TAPS, "intermediate_size": CHANNELS}
OF_JAMBA = {"mamba_d_state": SIZE, "mamba_dt_rank": TIMES, "mamba_d_conv": TAPS, "mamba_expand": 2}
PLAIN = Mamba1Spec([True, True], CHANNELS, SIZE, TIMES, TAPS, has_bias=True, has_conv_bias=False)
CASES = {
    "plain": (PLAIN, lambda: MambaMixer(MambaConfig(**SIZES, **OWN, use_bias=True, use_conv_bias=False), 0, False)),
    "norms without weights": (
        replace(PLAIN, norms="bare", norm_eps=EPS, has_bias=False, has_conv_bias=True),
        lambda: FalconMambaMixer(FalconMambaConfig(**SIZES, **OWN, mixer_rms_eps=EPS), 0, False),
    ),
    "norms with weights": (
        replace(PLAIN, norms="weighted", norm_eps=EPS, has_conv_bias=True, num_channels=2 * HIDDEN),
        lambda: JambaMambaMixer(JambaConfig(**SIZES, **OF_JAMBA, mamba_proj_bias=True, rms_norm_eps=EPS), 0),
    ),
}


class States:
    """Computes one sequence from its begin. Implements `Attention`."""

    def __init__(self, spec: Mamba1Spec, mixer: Mamba1Mixer) -> None:
        states = empty_states(1, 1, spec.state(1), torch.float32, torch.device("cpu"))
        own: dict[str, Any] = {each.field: state[0] for each, state in zip(spec.state(1), states, strict=True)}
        recurrence = recurrence_of(spec, 1)
        self._layer = recurrence.layer(**mixer.constants.of_state, **own)
        self._kernels = recurrence.kernels("torch", batch_invariant=False)

    def begin(self, step: Any, tensors: Any) -> None: ...

    def __call__(self, layer: int, x_TX: Tensor) -> Tensor:
        sequences_n4 = np.array([[0, len(x_TX), FROM_ZERO, 0]], np.int32)
        return self._kernels(self._layer, x_TX, StateStep(sequences_n4, 0, np.zeros((0, 3), np.int32)))


@pytest.mark.parametrize("kind", CASES)
def test_results_are_those_of_transformers_code(kind: str) -> None:
    spec, make = CASES[kind]
    torch.manual_seed(3)
    expected = make().eval()
    for parameter in expected.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    stored = {f"mamba.{name}": each for name, each in expected.state_dict().items()}

    def fill(out: Tensor, name: str, expected_shape: tuple[int, ...], part: Any) -> None:
        assert stored[name].shape == expected_shape
        out.copy_(stored[name][part])

    model = replace(SPEC, state=spec)
    layout = RankLayout(WeightShare(model, torch.float32), has_no_tensor, fill)
    weights, ranks = layout.part(spec, ""), TensorParallel()
    mixer = Mamba1Mixer(PartPlace(model, 0, 0, ranks, SplitExperts(ranks), make_operations("torch")), weights)
    x_TD = torch.randn(70, HIDDEN)
    with torch.inference_mode():
        found_TD, expected_TD = mixer.o(mixer(x_TD, States(spec, mixer))), expected(x_TD[None])[0]
    torch.testing.assert_close(found_TD, expected_TD, atol=1e-4, rtol=1e-4)
    for (name, kept), (_, own) in zip(mixer.weights().named(), weights.named(), strict=True):
        assert kept is own is None or torch.equal(kept, own), name
