"""The order of outputs in which native kernels compute gated layers: in panels of 16."""

from __future__ import annotations

from torch import Tensor

PANEL_OUTPUTS = 16
"""Outputs of a linear layer whose weights are packed together."""


def side_by_side(gate_up_OX: Tensor) -> Tensor:
    """Return the rows in another order: a panel of the first half, a panel of the second half, and so on."""
    return gate_up_OX.view(2, -1, PANEL_OUTPUTS, *gate_up_OX.shape[1:]).transpose(0, 1).reshape(gate_up_OX.shape)


def one_after_the_other(gate_up_OX: Tensor) -> Tensor:
    """The inverse of `side_by_side`."""
    return gate_up_OX.view(-1, 2, PANEL_OUTPUTS, *gate_up_OX.shape[1:]).transpose(0, 1).reshape(gate_up_OX.shape)
