"""Gates, compared with transformers' activations and with the formula."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from raycore.errors import InvalidConfig
from raycore.layers.gate import gate_and_mul
from raycore.models.spec import ClampedSwiglu, GateFunction, LimitedSilu

GATE_UP_TF = torch.randn(5, 14, generator=torch.Generator().manual_seed(0)) * 3


@pytest.mark.parametrize(
    ("gate", "name"), [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("relu2", "relu2")]
)
def test_gates_equal_the_activations_of_transformers(gate, name: str) -> None:
    gate_TF, up_TF = GATE_UP_TF.chunk(2, dim=1)
    torch.testing.assert_close(gate_and_mul(gate, GATE_UP_TF.clone()), ACT2FN[name](gate_TF) * up_TF)


def test_a_plugins_gate_function_gets_the_halves_gate_and_up() -> None:
    gate_TF, up_TF = GATE_UP_TF.chunk(2, dim=1)
    found = gate_and_mul(GateFunction("torch.hypot"), GATE_UP_TF.clone())
    torch.testing.assert_close(found, (gate_TF**2 + up_TF**2).sqrt())
    with pytest.raises(
        InvalidConfig, match=r"gate='torch.nothing' can't be imported .* name it as package.module.Name"
    ):
        gate_and_mul(GateFunction("torch.nothing"), GATE_UP_TF.clone())


def test_clamped_swiglu_equals_the_formula() -> None:
    alpha, limit = 1.5, 2.0
    found = gate_and_mul(ClampedSwiglu(alpha, limit), GATE_UP_TF.clone())
    for row, found_F in zip(GATE_UP_TF.double().tolist(), found.tolist(), strict=True):
        for gate, up, number in zip(row[:7], row[7:], found_F, strict=True):
            clamped, clamped_up = min(gate, limit), max(-limit, min(up, limit))
            sigmoid = float(torch.tensor(alpha * clamped).double().sigmoid())
            assert number == pytest.approx(clamped * sigmoid * (clamped_up + 1), rel=1e-5)
    # otherwise, this would show nothing of the clamps
    assert GATE_UP_TF.max() > limit
    assert GATE_UP_TF.min() < -limit


def test_a_limited_silu_is_limited_after_the_activation() -> None:
    limit = 1.5
    gate_TF, up_TF = GATE_UP_TF.chunk(2, dim=1)
    activated_TF = torch.nn.functional.silu(gate_TF)
    found = gate_and_mul(LimitedSilu(limit), GATE_UP_TF.clone())
    torch.testing.assert_close(found, activated_TF.clamp(max=limit) * up_TF.clamp(-limit, limit))
    assert activated_TF.max() > limit
    assert up_TF.min() < -limit
