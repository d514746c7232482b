"""The order in which native kernels have the weights of a linear layer: in panels of 16 outputs."""

from __future__ import annotations

import torch
from torch import Tensor

from raycore.weights.gathered import GatheredRows

PANEL_OUTPUTS = 16
"""Outputs of a linear layer whose weights are packed together."""


def unpack_panels(packed_OI: Tensor) -> Tensor:
    """The inverse of the kernel `pack_linear`. Keeps the rows that fill the last panel.

    A panel has the numbers of all its outputs for an input together; in bfloat16, for two inputs.
    """
    together = 2 if packed_OI.dtype == torch.bfloat16 else 1
    panels = packed_OI.view(-1, packed_OI.shape[1] // together, PANEL_OUTPUTS, together)
    return panels.transpose(1, 2).reshape(packed_OI.shape)


def side_by_side(gate_up_OX: Tensor) -> Tensor:
    """Return the rows in another order: a panel of the first half, a panel of the second half, and so on."""
    if isinstance(gate_up_OX, GatheredRows):
        return gate_up_OX.reordered(side_by_side(torch.arange(len(gate_up_OX))))
    return gate_up_OX.view(2, -1, PANEL_OUTPUTS, *gate_up_OX.shape[1:]).transpose(0, 1).reshape(gate_up_OX.shape)


def one_after_the_other(gate_up_OX: Tensor) -> Tensor:
    """The inverse of `side_by_side`."""
    return gate_up_OX.view(-1, 2, PANEL_OUTPUTS, *gate_up_OX.shape[1:]).transpose(0, 1).reshape(gate_up_OX.shape)
