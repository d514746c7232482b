"""Layers that keep a state of a fixed size for each sequence, instead of keys and values. Does not import torch."""

from __future__ import annotations

__all__ = ["StateMixer", "state_layers"]

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from raycore.json_fields import JsonFields
from raycore.models.mixers.spec import MixerSpec, Refusable

_WHY = "has layers that keep a state"


class StateMixer(MixerSpec, frozen=True):
    """What layers that keep a state have in common. Sizes are those of the whole model."""

    layers: list[bool]
    """For each layer, whether it is such a layer. The others have attention."""

    memory: ClassVar[str] = "raycore.state.recurrence.StateMemory"
    refused: ClassVar[Mapping[Refusable, str]] = {
        "context_parallelism": _WHY,
        "kv_transfer": _WHY,
        "draft_model": _WHY,
        # where states are read and written is a new number in every step
        "graphs": _WHY,
        "roofline": _WHY,
    }

    @abstractmethod
    def of_rank(self, tp_size: int) -> StateMixer:
        """Return the sizes on one of `tp_size` ranks."""


def state_layers(config: JsonFields, every: int | None = None) -> list[bool]:
    """Return for each layer whether `layer_types` says `linear_attention`, not `full_attention`.

    `every`: without `layer_types`, every such layer has attention.

    Raises:
        InvalidCheckpoint: a type is another one, or no layer has attention.
    """
    num_layers, types = config.int_("num_hidden_layers"), config.list_("layer_types")
    if types is None:
        types = ["full_attention" if every and (i + 1) % every == 0 else "linear_attention" for i in range(num_layers)]
    known = ("linear_attention", "full_attention")
    if len(types) != num_layers or any(each not in known for each in types) or "full_attention" not in types:
        expected = (
            f"a list of {num_layers} entries (num_hidden_layers), each {' or '.join(known)}, one of these at least"
        )
        raise config.error("layer_types", expected)
    return [each == "linear_attention" for each in types]
