"""What stands in place of a mixer in a layer that has a feed-forward part alone. Does not import torch."""

from __future__ import annotations

__all__ = ["NO_MIXER", "NoMixer"]

from typing import TYPE_CHECKING, ClassVar

from raycore.models.linears import FusedLinear
from raycore.models.mixers.spec import MixerSpec

if TYPE_CHECKING:
    from raycore.models.spec import ModelSpec


class NoMixer(MixerSpec, frozen=True):
    """Nothing mixes tokens."""

    computed_by: ClassVar[str] = "raycore.decoder.no_parts.NullMixer"
    weights_class: ClassVar[str] = "raycore.decoder.no_parts.NoWeights"
    described: ClassVar[str] = "mixes no tokens"
    memory: ClassVar[str] = "raycore.step.memory.MixerMemory"
    is_null: ClassVar[bool] = True

    def linears(
        self, model: ModelSpec, tp_rank: int = 0, tp_size: int = 1, num_inputs: int | None = None
    ) -> tuple[FusedLinear, ...]:
        return ()


NO_MIXER = NoMixer()
"""That of any model."""
