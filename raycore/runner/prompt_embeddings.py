"""The embeddings of prompts that requests bring, as a runner uses them. Nothing is encoded.

Shape suffixes: T tokens of the step, I those of a feature, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from raycore.messages import EncoderPlan
from raycore.profile_session import ProfiledParts
from raycore.step.feature_values import values_of
from raycore.step.features import FeatureRows


class PromptEmbeddings:
    """Keeps embeddings, and puts them where their tokens are. The scheduler decides what is kept. See `StepImages`."""

    num_weights = 0

    def __init__(self, multiplier: float, dtype: torch.dtype, device: torch.device) -> None:
        """
        Args:
            multiplier: what the model multiplies given embeddings with.
            dtype: of hidden states.
        """
        self._multiplier = float(torch.tensor(multiplier, dtype=dtype))
        self._dtype = dtype
        self._device = device
        self._kept: dict[str, Tensor] = {}
        """By the features' identifiers, [I, D]."""

    def num_patches(self, plan: EncoderPlan) -> int:
        """Nothing is encoded."""
        return 0

    def apply(self, plan: EncoderPlan) -> None:
        """Drop embeddings, and keep others."""
        for identifier in plan.freed:
            self._kept.pop(identifier, None)
        for feature, data in plan.inputs:
            values_ID = values_of(data).to(self._device, self._dtype)
            self._kept[feature.identifier] = values_ID if self._multiplier == 1.0 else values_ID * self._multiplier

    def merged(self, h_TD: Tensor, rows: Sequence[FeatureRows]) -> Tensor:
        """Put embeddings into the step's hidden states before the first layer, in place."""
        for each in rows:
            part_ID = self._kept[each.identifier][each.start : each.start + each.num_rows]
            h_TD[each.row : each.row + each.num_rows] = part_ID
        return h_TD

    def deepstack(self, rows: Sequence[FeatureRows]) -> Mapping[int, Callable[[Tensor], None]]:
        """Nothing is added later."""
        return {}

    def parts(self) -> ProfiledParts:
        """Nothing takes long enough to be a part of profiles."""
        yield from ()
