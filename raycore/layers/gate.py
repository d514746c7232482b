"""The activation of a gated layer, in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_and_mul(gate_up_TF: Tensor) -> Tensor:
    """Return `silu(gate) · up`, [T, F]. `gate_up_TF` has the gate columns, then the up columns."""
    gate_TF, up_TF = gate_up_TF.chunk(2, dim=1)
    return functional.silu(gate_TF).mul_(up_TF)
