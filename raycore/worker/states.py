"""A worker's layers that keep states: how many there are, their memory, and what computes them."""

from __future__ import annotations

from typing import Any

from raycore.decoder.network import Network
from raycore.models.mixers.spec import MixerSpec, StateTensor
from raycore.state.recurrence import recurrence_of
from raycore.state.slot_rows import SlotRows
from raycore.state.state_layers import StateLayers, empty_states, state_bytes
from raycore.worker.setup import WorkerSetup


def state_layers(setup: WorkerSetup) -> list[int]:
    """Return which layers of the worker's stage keep a state, as their indexes in the stage."""
    return [index for index in range(len(setup.stage.layers)) if _mixer(setup, index).keeps_state]


def row_bytes(setup: WorkerSetup) -> int:
    """Return the bytes of a row of states on the worker."""
    return sum(state_bytes(_tensors(setup, layer), setup.dtype) for layer in state_layers(setup))


def worker_state_bytes(setup: WorkerSetup) -> int:
    """Return the bytes of all rows of states on the worker."""
    rows = setup.config.state_rows
    return 0 if rows is None else rows.total * row_bytes(setup)


def make_state_layers(setup: WorkerSetup, network: Network) -> StateLayers[Any] | None:
    """Allocate the states of the worker's layers, and return what computes these. None: no layer keeps a state."""
    rows, layers = setup.config.state_rows, state_layers(setup)
    if rows is None or not layers:
        return None
    tensors = _tensors(setup, layers[0])  # all of these layers are alike
    states = empty_states(len(layers), rows.total, tensors, setup.dtype, setup.device)
    recurrence = recurrence_of(_mixer(setup, layers[0]), setup.rank.tp_size)
    names = [tensor.field for tensor in tensors]
    made = [
        recurrence.layer(**network.constants[layer].of_state, **dict(zip(names, own, strict=True)))
        for layer, own in zip(layers, zip(*states, strict=True), strict=True)
    ]
    slots = SlotRows(rows.num_slots, rows.rows_per_slot)
    return StateLayers(made, states, setup.backend.kernels_of_states(recurrence), slots)


def _mixer(setup: WorkerSetup, index: int) -> MixerSpec:
    """Return what mixes tokens in a layer, whose index is that in the stage."""
    return setup.config.model.spec.mixers[setup.stage.layers[index]]


def _tensors(setup: WorkerSetup, index: int) -> tuple[StateTensor, ...]:
    return _mixer(setup, index).state(setup.rank.tp_size)
