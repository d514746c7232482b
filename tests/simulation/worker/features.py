"""The embeddings of features that a worker keeps."""

from __future__ import annotations

from raycore.messages import EncoderPlan
from raycore.parts.images.config import EncoderLimits
from raycore.step.features import StepFeatures
from simulation.worker import model
from simulation.worker.numbers64 import Words


class Embeddings:
    """See the module. By identifier: the number of tokens, and the embedding."""

    def __init__(self, limits: EncoderLimits) -> None:
        self._limits = limits
        self._kept: dict[str, tuple[int, Words]] = {}

    def apply(self, plan: EncoderPlan, weights: Words) -> None:
        """Drop and compute embeddings."""
        for identifier in plan.freed:
            self._kept.pop(identifier, None)
        for feature, data in plan.inputs:
            self._kept[feature.identifier] = feature.num_tokens, model.embedding(data.data, weights)
        num_tokens = sum(count for count, _ in self._kept.values())
        assert num_tokens <= self._limits.cache_size, f"{num_tokens} embeddings in a cache of {self._limits.cache_size}"

    def replace(self, content_T: Words, features: StepFeatures) -> None:
        """Put embeddings in the place of a step's tokens that stand for them."""
        for each in features.rows:
            assert each.identifier in self._kept, f"the embeddings of {each.identifier} aren't there"
            _, embedding = self._kept[each.identifier]
            content_T[each.row : each.row + each.num_rows] = model.feature_content(embedding, each.start, each.num_rows)
