"""Layers that keep a state of a fixed size for each sequence, instead of keys and values. Does not import torch."""

from __future__ import annotations

__all__ = ["MatrixMixer", "StateMixer", "state_layers"]

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from raycore.json_fields import JsonFields
from raycore.models.layer_part import Refusable
from raycore.models.mixers.spec import MixerSpec, StateTensor

_WHY = "has layers that keep a state"


class StateMixer(MixerSpec, frozen=True):
    """What layers that keep a state have in common. Sizes are those of the whole model."""

    layers: list[bool]
    """For each layer, whether it is such a layer. The others have attention."""

    described: ClassVar[str] = "keeps a state"
    memory: ClassVar[str] = "raycore.state.recurrence.StateMemory"
    refused: ClassVar[Mapping[Refusable, str]] = {
        "draft_model": _WHY,
        # where states are read and written is a new number in every step
        "graphs": _WHY,
        "roofline": _WHY,
    }

    @abstractmethod
    def of_rank(self, tp_size: int) -> StateMixer:
        """Return the sizes on one of `tp_size` ranks. What computes the layers gets them."""


class MatrixMixer(StateMixer, frozen=True):
    """Layers whose states are a matrix for each value head, and the last inputs of a convolution."""

    num_v_heads: int
    k_dim: int
    """Number of elements of a key head, and of a query head."""
    v_dim: int
    """Number of elements of a value head."""
    conv_size: int
    """Number of taps of the convolution, the token's own included."""

    @abstractmethod
    def of_rank(self, tp_size: int) -> MatrixMixer: ...

    @property
    @abstractmethod
    def num_channels(self) -> int:
        """Number of channels of the convolution."""

    @property
    def num_values(self) -> int:
        """Number of elements of all value heads."""
        return self.num_v_heads * self.v_dim

    def state(self, tp_size: int) -> tuple[StateTensor, ...]:
        own = self.of_rank(tp_size)
        return (
            StateTensor("conv_states_RCW", (own.num_channels, own.conv_size - 1)),
            StateTensor("states_RNKH", (own.num_v_heads, own.k_dim, own.v_dim), is_float32=True),
        )


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
