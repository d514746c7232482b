"""Attention and Mamba-2 beside each other, as config.json describes them. Does not import torch.

Both read the layer's input, and their results are added. A layer keeps keys and values in blocks, and a state.
"""

from __future__ import annotations

__all__ = ["BesideSpec", "attention_beside"]

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, cast

from raycore.models.layer_part import LayerPart, PartTensor
from raycore.models.linears import FusedLinear
from raycore.models.mixers.attention import AttentionHeads
from raycore.models.mixers.mamba2 import Mamba2Spec
from raycore.models.mixers.spec import Cached, StateTensor
from raycore.models.mixers.state import StateMixer

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec


class BesideSpec(StateMixer, frozen=True, tag=True):
    """Layers that have attention and Mamba-2."""

    mamba: Mamba2Spec
    """With the same `layers`."""
    attention_multipliers: tuple[float, float] = (1.0, 1.0)
    """What the input of attention and its result are multiplied by."""
    mamba_multipliers: tuple[float, float] = (1.0, 1.0)
    """The same of Mamba-2."""

    computed_by: ClassVar[str] = "raycore.decoder.beside_mixer.BesideMixer"
    weights_class: ClassVar[str] = "raycore.decoder.beside_mixer.BesideWeights"
    described: ClassVar[str] = "has attention and keeps a state"
    memory: ClassVar[str] = "raycore.decoder.beside_mixer.BesideMemory"
    recurrence: ClassVar[str] = Mamba2Spec.recurrence
    refused_adapters: ClassVar[Mapping[str, str]] = Mamba2Spec.refused_adapters

    @property
    def split_sizes(self) -> dict[str, int]:
        return self.mamba.split_sizes

    def of_rank(self, tp_size: int) -> Mamba2Spec:
        """Return what computes the states on one of `tp_size` ranks: attention has none."""
        return self.mamba.of_rank(tp_size)

    def inner(self, model: ModelSpec) -> Mapping[str, LayerPart]:
        return {"attention": attention_beside(model), "mamba": self.mamba}

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        parts = self.inner(model).values()
        return tuple(chain.from_iterable(each.linears(model, tp_rank, tp_size, num_inputs) for each in parts))

    def vectors(self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1) -> tuple[PartTensor, ...]:
        return tuple(chain.from_iterable(each.vectors(model, tp_rank, tp_size) for each in self.inner(model).values()))

    def sizes(self, model: ModelSpec, tp_size: int) -> dict[str, int]:
        return attention_beside(model).sizes(model, tp_size)

    def cached(self, model: ModelSpec, layer: int) -> Cached:
        return attention_beside(model).cached(model, layer)

    def cached_numbers(self, model: ModelSpec, tp_size: int) -> int:
        return attention_beside(model).cached_numbers(model, tp_size)

    def state(self, tp_size: int) -> tuple[StateTensor, ...]:
        return self.mamba.state(tp_size)


def attention_beside(model: ModelSpec) -> AttentionHeads:
    """Return the attention of such layers, which is the same in all of them."""
    return cast("AttentionHeads", model.attention_by_layer[0])
