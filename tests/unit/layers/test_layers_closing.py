"""The end of a layer, compared with its formula."""

from __future__ import annotations

from pathlib import Path

import torch
from gemma4_config import CONFIG, GEMMA4
from layer_places import place_of, random_part
from model_specs import spec_of
from torch.nn import functional

from raycore.layers.closing import ClosingFeedForward
from raycore.layers.handed import Handed


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight, 1e-6)


def test_a_layer_ends_with_its_own_input_and_a_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    spec, handed = spec_of(tmp_path, GEMMA4, **CONFIG), Handed()
    # twice as wide as the others
    weights = random_part(spec, spec.feed_forwards[8])
    assert weights.down_DF.shape == (32, 80)
    part = ClosingFeedForward(place_of(spec, 8, handed), weights)
    h_TD, x_TD, inputs_TLP = torch.randn(5, 32), torch.randn(5, 32), torch.randn(5, 9, 6)
    handed.begin(inputs_TLP)
    gate_TF, up_TF = (x_TD @ weights.gate_up_FD.t()).chunk(2, 1)
    out_TD = (functional.gelu(gate_TF, approximate="tanh") * up_TF) @ weights.down_DF.t()
    expected_TD = h_TD + normed(out_TD, weights.after_D)
    gated_TP = functional.gelu(expected_TD @ weights.input_gate_PD.t(), approximate="tanh") * inputs_TLP[:, 8]
    expected_TD = expected_TD + normed(gated_TP @ weights.input_out_DP.t(), weights.input_norm_D)
    torch.testing.assert_close(part.add_to(h_TD.clone(), x_TD), expected_TD * weights.scalar_1)
    for field, each in vars(part.weights()).items():
        if each is not None:
            torch.testing.assert_close(each, getattr(weights, field))
