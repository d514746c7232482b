"""Gates as kernels get them."""

from __future__ import annotations

from raycore.models.spec import ClampedSwiglu, Gate, GateFunction, LimitedSilu

_CLAMPED = "clamped_swiglu"
_NATIVE = ("silu", "gelu", "gelu_tanh", "relu2", _CLAMPED)
"""In the order of `GateKind` in `csrc/kernels.h`, which begins with none."""


def has_kernels(gate: Gate) -> bool:
    """Whether kernels know the gate. Plain torch computes the others, such as those of plugins."""
    return not isinstance(gate, GateFunction | LimitedSilu)


def gate_arguments(gate: Gate) -> tuple[str, float, float]:
    """Return the gate's name, and the alpha and the limit of a clamped one."""
    assert not isinstance(gate, GateFunction | LimitedSilu), "plain torch computes it"
    return (_CLAMPED, gate.alpha, gate.limit) if isinstance(gate, ClampedSwiglu) else (gate, 0.0, 0.0)


def native_gate_arguments(gate: Gate) -> tuple[int, float, float]:
    """Return the same with the number that the native kernels have for the name."""
    name, alpha, limit = gate_arguments(gate)
    return _NATIVE.index(name) + 1, alpha, limit
