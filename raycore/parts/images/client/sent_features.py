"""Which data of images each rank has already, as far as a client knows, so that an image travels once."""

from __future__ import annotations

import msgspec

from raycore.lru_bytes import LruBytes
from raycore.messages import EngineRequest, FeatureData


class SentFeatures:
    """What one client has sent to ranks. A rank may have dropped some of it: it asks for that.

    Not thread-safe: the client's lock is held in every call.
    """

    def __init__(self, max_bytes: int) -> None:
        """`max_bytes`: how much each rank keeps (`FeatureInputs`)."""
        self._max_bytes = max_bytes
        self._by_rank: dict[int, LruBytes[None]] = {}

    def without_known(self, dp_rank: int, request: EngineRequest) -> EngineRequest:
        """Return a request as the rank gets it: without the data that it has."""
        if not request.features:
            return request
        known = self._by_rank.setdefault(dp_rank, LruBytes(self._max_bytes))
        sent: list[FeatureData | None] = []
        for feature, data in zip(request.features, request.feature_data, strict=True):
            assert data is not None, "the client keeps it until the request has ended"
            is_known = feature.identifier in known
            sent.append(None if is_known else data)
            known.put(feature.identifier, None, len(data.data))
        return msgspec.structs.replace(request, feature_data=sent)

    def forget(self, dp_rank: int) -> None:
        """Note that a rank has nothing, because it is new or gone."""
        self._by_rank.pop(dp_rank, None)

    def clear(self) -> None:
        """Note that no rank has anything."""
        self._by_rank.clear()
