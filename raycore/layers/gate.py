"""The activations of gated layers, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from torch.nn import functional

from raycore.models.spec import Gate

_ACTIVATIONS: Mapping[Gate, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}


def gate_and_mul(gate: Gate, gate_up_TF: Tensor) -> Tensor:
    """Return `activation(gate) · up`, [T, F]. `gate_up_TF` has the gate columns, then the up columns."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
    return _ACTIVATIONS[gate](gate_TF).mul_(up_TF)
