"""The layers of a worker that keep states: their memory, and what computes them.

Shape suffixes: those of `raycore.state.spec`, and L layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from raycore.messages import StepPlan
from raycore.models.mixers.spec import StateTensor
from raycore.state.slot_rows import SlotRows
from raycore.state.spec import StateStep
from raycore.step.batch import StepInputs
from raycore.step.copies import to_device
from raycore.step.device_batch import StepTensors

LayerT = TypeVar("LayerT")
"""What the kernels know of a layer."""


class StateLayers(Generic[LayerT]):
    """Computes the layers of one step at a time: call `apply`, `begin`, then the object itself for every layer.

    Implements `Attention`. Layers are counted among those that keep states.
    """

    def __init__(
        self,
        layers: Sequence[LayerT],
        states: Sequence[Tensor],
        kernels: Callable[[LayerT, Tensor, StateStep], Tensor],
        rows: SlotRows,
    ) -> None:
        """`states`: the tensors [L, R, ...] that the layers' states are parts of."""
        self._layers = layers
        self.states_LR = states
        self._kernels = kernels
        self._rows = rows
        self._step: StateStep | None = None

    def apply(self, plan: StepPlan) -> None:
        """Note a plan's new requests, and which states are kept in its step."""
        self._rows.apply(plan)

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, which is that of the last plan."""
        self._step, copies_2n = self._rows.begin(step)
        if copies_2n.shape[1]:
            sources, targets = to_device(copies_2n, tensors.slots_T.device)
            for states_LR in self.states_LR:
                states_LR.index_copy_(1, targets, states_LR.index_select(1, sources))

    def __call__(self, layer: int, x_TX: Tensor) -> Tensor:
        """Compute one layer, and write its states. `x_TX`, and what is returned, are those of the kernels."""
        assert self._step is not None, "begin() comes first"
        return self._kernels(self._layers[layer], x_TX, self._step)


def state_bytes(tensors: Sequence[StateTensor], dtype: torch.dtype) -> int:
    """Return the bytes of one row's state in one layer."""
    return sum(math.prod(each.shape) * _dtype_of(each, dtype).itemsize for each in tensors)


def empty_states(
    num_layers: int, num_rows: int, tensors: Sequence[StateTensor], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Allocate the states of some layers: of each of `tensors`, [L, R, ...].

    They aren't initialized, because no row is read before it is written. So a CPU allocates only the pages of rows that
    are used.
    """
    return [
        torch.empty(num_layers, num_rows, *each.shape, dtype=_dtype_of(each, dtype), device=device) for each in tensors
    ]


def _dtype_of(tensor: StateTensor, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if tensor.is_float32 else dtype
