"""The gates of gated layers, and activations without a gate, in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial

import torch
from torch import Tensor
from torch.nn import functional

from raycore.class_paths import import_class
from raycore.models.spec import ClampedSwiglu, Gate, GateFunction, LimitedSilu
from raycore.plugins import MODELS


def _gelu(x_TF: Tensor) -> Tensor:
    # of rows with something between them, torch computes other bits than of a single row
    return functional.gelu(x_TF.contiguous())


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": _gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu2": lambda gate_TF: functional.relu(gate_TF).square_(),
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
"""By name. A row of the result depends only on the same row."""


def gate_and_mul(gate: Gate, gate_up_TF: Tensor) -> Tensor:
    """Return `activation(gate) · up`, [T, F], or what `gate` says instead.

    `gate_up_TF` has the gate columns, then the up columns. It may be overwritten.

    Raises:
        InvalidConfig: a plugin's function can't be imported.
    """
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
    if isinstance(gate, GateFunction):
        return _imported(gate)(gate_TF, up_TF)
    if isinstance(gate, ClampedSwiglu):
        gate_TF, up_TF = gate_TF.clamp_(max=gate.limit), up_TF.clamp_(-gate.limit, gate.limit).add_(1.0)
        return (gate_TF * gate.alpha).sigmoid_().mul_(gate_TF).mul_(up_TF)
    if isinstance(gate, LimitedSilu):
        up_TF = up_TF.clamp_(-gate.limit, gate.limit)
        return ACTIVATIONS["silu"](gate_TF).clamp_(max=gate.limit).mul_(up_TF)
    return ACTIVATIONS[gate](gate_TF).mul_(up_TF)


def activate(activation: Gate, x_TF: Tensor) -> Tensor:
    """Return the activation of `x_TF`, [T, F], by itself: what the gate of this name does to what gates.

    It may be overwritten.
    """
    assert isinstance(activation, str), "only activations with a name are without a gate"
    return ACTIVATIONS[activation](x_TF)


@cache
def _imported(gate: GateFunction) -> Callable[[Tensor, Tensor], Tensor]:
    return import_class("the model's gate", gate.path, MODELS)
