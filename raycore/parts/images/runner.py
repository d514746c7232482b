"""The interface of what encodes images or keeps given embeddings, as a runner uses it.

`raycore.parts.images.vision.images` and `raycore.runner.prompt_embeddings` implement it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from raycore.messages import EncoderPlan
from raycore.profile_session import ProfiledParts
from raycore.step.features import FeatureRows


class StepImages(Protocol):
    """Encodes images, keeps their embeddings, and puts these where their tokens are."""

    @property
    def num_weights(self) -> int:
        """Number of multiplications for one patch, without those of attention."""
        ...

    def num_patches(self, plan: EncoderPlan) -> int:
        """Return how many patches a step encodes."""
        ...

    def apply(self, plan: EncoderPlan) -> None:
        """Drop embeddings, and compute others."""
        ...

    def merged(self, h_TD: Tensor, rows: Sequence[FeatureRows]) -> Tensor:
        """Put embeddings into the hidden states before the first layer, which may be overwritten."""
        ...

    def deepstack(self, rows: Sequence[FeatureRows]) -> Mapping[int, Callable[[Tensor], None]]:
        """Return what adds further embeddings to the inputs of some layers of the model, in place, by layer."""
        ...

    def parts(self) -> ProfiledParts:
        """Return the parts of a step, for profiles."""
        ...
