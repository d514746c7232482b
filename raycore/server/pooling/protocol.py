"""Requests for pooling: see `raycore.parts.pooling`."""

from __future__ import annotations

__all__ = [
    "ClassificationRequest",
    "CohereEmbedRequest",
    "EmbedDType",
    "EmbeddingRequest",
    "EncodingFormat",
    "Endianness",
    "PoolingRequest",
    "RerankRequest",
    "ScoreRequest",
]

from raycore.parts.pooling.server.protocol import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    EmbedDType,
    EncodingFormat,
    Endianness,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
