"""A worker's layers that keep states: how many there are, their memory, and what computes them."""

from __future__ import annotations

from typing import Any

from raycore.decoder.network import Network
from raycore.models.state import DeltaSpec, StateSpec
from raycore.state.slot_rows import SlotRows
from raycore.state.spec import DeltaLayer, DeltaShape, Mamba2Layer, Mamba2Shape
from raycore.state.state_layers import StateLayers, StateSizes, empty_states, state_bytes
from raycore.worker.setup import WorkerSetup


def state_layers(setup: WorkerSetup) -> list[int]:
    """Return which layers of the worker's stage keep a state, as their indexes in the stage."""
    spec = setup.config.model.spec
    return [index for index, layer in enumerate(setup.stage.layers) if spec.has_state(layer)]


def worker_state_bytes(setup: WorkerSetup) -> int:
    """Return the bytes of all rows of states on the worker."""
    spec, rows = setup.config.model.spec, setup.config.state_rows
    if spec.state is None or rows is None:
        return 0
    return len(state_layers(setup)) * rows.total * state_bytes(_sizes(spec.state, setup.rank.tp_size), setup.dtype)


def make_state_layers(setup: WorkerSetup, network: Network) -> StateLayers[Any] | None:
    """Allocate the states of the worker's layers, and return what computes these. None: no layer keeps a state."""
    spec, rows, layers = setup.config.model.spec.state, setup.config.state_rows, state_layers(setup)
    if spec is None or rows is None or not layers:
        return None
    own, sizes = spec.of_rank(setup.rank.tp_size), _sizes(spec, setup.rank.tp_size)
    states = empty_states(len(layers), rows.total, sizes, setup.dtype, setup.device)
    constants: list[dict[str, Any]] = [network.state_constants[layer] for layer in layers]
    parts = [
        own | {"conv_states_RCW": conv_RCW, "states_RNKH": states_RNKH}
        for own, conv_RCW, states_RNKH in zip(constants, *states, strict=True)
    ]
    slots = SlotRows(rows.num_slots, rows.rows_per_slot)
    if isinstance(own, DeltaSpec):
        shape = DeltaShape(own.num_k_heads, own.num_v_heads, own.k_dim, own.v_dim, own.conv_size)
        delta = [DeltaLayer(**each) for each in parts]
        return StateLayers(delta, states, setup.backend.delta_rule(shape), slots)
    shape = Mamba2Shape(own.num_groups, own.num_v_heads, own.k_dim, own.v_dim, own.conv_size)
    mamba = [Mamba2Layer(**each) for each in parts]
    return StateLayers(mamba, states, setup.backend.mamba2(shape), slots)


def _sizes(state: StateSpec, tp_size: int) -> StateSizes:
    own = state.of_rank(tp_size)
    return StateSizes(own.num_channels, own.conv_size, own.num_v_heads, own.k_dim, own.v_dim)
