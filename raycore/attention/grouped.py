"""Attention of models whose layers don't all do the same, or don't all have their blocks in the same row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from raycore.attention.spec import Attention
from raycore.step.batch import StepInputs
from raycore.step.device_batch import StepTensors


class LayerPlace(NamedTuple):
    """Where a layer is computed."""

    attention: Attention
    """Computes several layers."""
    layer: int
    """The layer's index among those."""
    group: int | None = None
    """The group of the KV cache whose blocks they have. None: they have no blocks."""
    blocks_in_page: int = 1
    """How many blocks of such layers are in a page. They use the first of each, so theirs have other ids."""


class GroupedAttention:
    """Sends each layer to what computes it. Implements `Attention`."""

    def __init__(self, places: Mapping[int, LayerPlace]) -> None:
        """`places`: by layer of the stage. Layers with attention and a state have another one for the state, at
        `PartPlace.state_index`."""
        self._places = places
        self._parts = list({id(place.attention): place for place in places.values()}.values())
        """A place of each different `attention`."""

    def begin(self, step: StepInputs, tensors: StepTensors) -> None:
        """Prepare for the layers of `step`, whose inputs on the device are `tensors`.

        Each part sees the block tables of its own group.
        """
        tables, tables_GSM = step.group_tables, tensors.group_tables_GSM
        assert tables is not None
        assert tables_GSM is not None
        for attention, _, group, blocks_in_page in self._parts:
            if group is None:
                attention.begin(step, tensors)
                continue
            own, own_SM = tables[group], tables_GSM[group]
            if blocks_in_page > 1:
                own, own_SM = own * blocks_in_page, own_SM * blocks_in_page
            attention.begin(replace(step, block_tables=own), replace(tensors, block_tables_SM=own_SM))

    def __call__(self, layer: int, qkv_TO: Tensor) -> Tensor:
        place = self._places[layer]
        return place.attention(place.layer, qkv_TO)
