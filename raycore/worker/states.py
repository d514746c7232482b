"""A worker's layers that keep states: how many there are, their memory, and what computes them."""

from __future__ import annotations

from raycore.decoder.decoder import Decoder
from raycore.models.state import DeltaSpec
from raycore.state.slot_rows import SlotRows
from raycore.state.spec import DeltaLayer, DeltaShape
from raycore.state.state_layers import StateLayers, delta_state_bytes, delta_states
from raycore.worker.setup import WorkerSetup


def state_layers(setup: WorkerSetup) -> list[int]:
    """Return which layers of the worker's stage keep a state, as their indexes in the stage."""
    spec = setup.config.model.spec
    return [index for index, layer in enumerate(setup.stage.layers) if spec.has_state(layer)]


def state_bytes(setup: WorkerSetup) -> int:
    """Return the bytes of all rows of states on the worker."""
    spec, rows = setup.config.model.spec, setup.config.state_rows
    if spec.state is None or rows is None:
        return 0
    shape = _shape(spec.state, setup.rank.tp_size)
    return len(state_layers(setup)) * rows.total * delta_state_bytes(shape, setup.dtype)


def make_state_layers(setup: WorkerSetup, decoder: Decoder) -> StateLayers | None:
    """Allocate the states of the worker's layers, and return what computes these. None: no layer keeps a state."""
    spec, rows, layers = setup.config.model.spec.state, setup.config.state_rows, state_layers(setup)
    if spec is None or rows is None or not layers:
        return None
    shape = _shape(spec, setup.rank.tp_size)
    conv_LRCW, rule_LRNKH = delta_states(len(layers), rows.total, shape, setup.dtype, setup.device)
    constants = [each for each in decoder.state_constants if each is not None]
    made = [DeltaLayer(*own, conv, rule) for own, conv, rule in zip(constants, conv_LRCW, rule_LRNKH, strict=True)]
    slots = SlotRows(rows.num_slots, rows.rows_per_slot)
    return StateLayers(made, [conv_LRCW, rule_LRNKH], setup.backend.delta_rule(shape), slots)


def _shape(state: DeltaSpec, tp_size: int) -> DeltaShape:
    own = state.of_rank(tp_size)
    return DeltaShape(own.num_k_heads, own.num_v_heads, own.k_dim, own.v_dim, own.conv_size)
