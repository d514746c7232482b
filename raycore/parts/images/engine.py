"""What features of prompts, such as images, are encoded from. A rank keeps it, so that it needn't be sent again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raycore.engine.part import EnginePart
from raycore.lru_bytes import LruBytes
from raycore.messages import EngineRequest, FeatureData


class FeatureInputs(EnginePart):
    """The data of features that clients have sent to this rank, by identifier.

    A request has its own references to its data, so nothing that an unfinished request needs can be lost.
    """

    def __init__(self, max_bytes: int, reset_encoder_cache: Callable[[], None]) -> None:
        """`reset_encoder_cache`: has the workers drop the embeddings of all features."""
        self._kept: LruBytes[FeatureData] = LruBytes(max_bytes)
        self._reset_encoder_cache = reset_encoder_cache

    def calls(self) -> dict[str, Callable[..., Any]]:
        return {"reset_mm_cache": self.clear, "reset_encoder_cache": self._reset_encoder_cache}

    def complete(self, request: EngineRequest) -> list[str]:
        """Add the data that the client hasn't sent to a request, as far as this rank has it.

        Returns: the identifiers of features whose data is missing, without repetitions. If there are any, the request
            can't run.
        """
        if not request.features:
            return []
        found: list[FeatureData | None] = []
        own: dict[str, FeatureData] = {}
        for feature, data in zip(request.features, request.feature_data, strict=True):
            identifier = feature.identifier
            kept = own.get(identifier) or self._kept.get(identifier)
            if data is not None:
                # requests share one copy, if the rank has one already
                data = kept or data
                own[identifier] = data
                self._kept.put(identifier, data, len(data.data))
            found.append(data or kept)
        request.feature_data = found
        missing = [feature.identifier for feature, data in zip(request.features, found, strict=True) if data is None]
        return list(dict.fromkeys(missing))

    def clear(self) -> None:
        """Forget all data. Requests keep theirs."""
        self._kept.clear()
