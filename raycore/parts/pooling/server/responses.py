"""Models of responses of models that pool, for the OpenAPI document. The server itself sends plain values."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from raycore.server.openapi.response_models import Usage

Number = float | None
"""null stands for what isn't finite."""


class Embedding(BaseModel):
    index: int
    object: Literal["embedding"]
    embedding: list[Number] | str


class EmbeddingAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: Usage


class Classification(BaseModel):
    index: int
    label: str | None
    probs: list[Number]
    num_classes: int


class ClassificationAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classification]
    usage: Usage


class PoolingResult(BaseModel):
    index: int
    object: Literal["pooling"]
    data: list[Number] | list[list[Number]] | str


class PoolingAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PoolingResult]
    usage: Usage


class Score(BaseModel):
    index: int
    object: Literal["score"]
    score: Number


class ScoreAnswer(BaseModel):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: Usage


class RankedText(BaseModel):
    text: str


class RankedDocument(BaseModel):
    index: int
    document: RankedText | None = None
    relevance_score: Number


class RerankUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class RerankAnswer(BaseModel):
    id: str
    model: str
    usage: RerankUsage
    results: list[RankedDocument]


class CohereEmbeddings(BaseModel):
    float: list[list[Number]] | None = None
    base64: list[str] | None = None
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None


class CohereVersion(BaseModel):
    version: str


class CohereBilled(BaseModel):
    input_tokens: int
    image_tokens: int


class CohereMeta(BaseModel):
    api_version: CohereVersion
    billed_units: CohereBilled


class CohereEmbedAnswer(BaseModel):
    id: str
    embeddings: CohereEmbeddings
    texts: list[str] | None = None
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]
