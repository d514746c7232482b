"""What the endpoints of models that pool take and answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pydantic import BaseModel

from raycore.parts.pooling.server.cohere import prepare_cohere_embed
from raycore.parts.pooling.server.pooled import PoolingJob
from raycore.parts.pooling.server.protocol import (
    ClassificationRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from raycore.parts.pooling.server.requests import prepare_classification, prepare_embedding, prepare_pooling
from raycore.parts.pooling.server.responses import (
    ClassificationAnswer,
    CohereEmbedAnswer,
    EmbeddingAnswer,
    PoolingAnswer,
    RerankAnswer,
    ScoreAnswer,
)
from raycore.parts.pooling.server.scores import prepare_rerank, prepare_score
from raycore.server.endpoints import Endpoint, Rule, endpoints_with
from raycore.server.protocol import Routed


class PoolingFamily(NamedTuple):
    """What an endpoint's requests and responses are."""

    body: type[Routed]
    prepare: Callable[..., PoolingJob]
    """Checks a request: (engine, body, options, models)."""
    answer: type[BaseModel]
    what: str
    """For the OpenAPI document."""


_EMBEDDINGS = PoolingFamily(EmbeddingRequest, prepare_embedding, EmbeddingAnswer, "Compute embeddings of inputs.")
_COHERE = PoolingFamily(
    CohereEmbedRequest, prepare_cohere_embed, CohereEmbedAnswer, "Compute embeddings, as Cohere's API."
)
_CLASSES = PoolingFamily(ClassificationRequest, prepare_classification, ClassificationAnswer, "Classify inputs.")
_POOLING = PoolingFamily(PoolingRequest, prepare_pooling, PoolingAnswer, "Run one of the model's tasks on inputs.")
_SCORES = PoolingFamily(ScoreRequest, prepare_score, ScoreAnswer, "Score pairs of texts.")
_RANKING = PoolingFamily(RerankRequest, prepare_rerank, RerankAnswer, "Rank documents by how well they fit a query.")

FAMILIES: dict[Endpoint, PoolingFamily] = {
    Endpoint.EMBEDDINGS: _EMBEDDINGS,
    Endpoint.COHERE_EMBED: _COHERE,
    Endpoint.CLASSIFY: _CLASSES,
    Endpoint.POOLING: _POOLING,
    Endpoint.SCORE: _SCORES,
    Endpoint.SCORE_V1: _SCORES,
    Endpoint.RERANK: _RANKING,
    Endpoint.RERANK_V1: _RANKING,
    Endpoint.RERANK_V2: _RANKING,
}
assert list(FAMILIES) == endpoints_with(Rule.POOLS), "each endpoint of models that pool has a family"
