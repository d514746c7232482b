"""Endpoints that a model doesn't have: errors that say what the model has, and what to start instead."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import FastAPI

from raycore.models.pooling import PoolingSpec
from raycore.server.endpoints import Endpoint, Rule, endpoints_with
from raycore.server.errors import APIError

_NEEDED: dict[Endpoint, tuple[str, ...]] = {
    Endpoint.EMBEDDINGS: ("embed",),
    Endpoint.COHERE_EMBED: ("embed",),
    Endpoint.CLASSIFY: ("classify",),
    **dict.fromkeys(
        (Endpoint.SCORE, Endpoint.SCORE_V1, Endpoint.RERANK, Endpoint.RERANK_V1, Endpoint.RERANK_V2),
        ("score", "embed", "token_embed"),
    ),
}
"""The tasks that an endpoint needs one of. /pooling serves any of them."""


def is_served(endpoint: Endpoint, spec: PoolingSpec | None) -> bool:
    """Whether a model has an endpoint. `spec`: what the model pools. None: it generates."""
    if Rule.GENERATES in endpoint.rules:
        return spec is None
    if Rule.POOLS in endpoint.rules:
        needed = _NEEDED.get(endpoint)
        return spec is not None and (needed is None or not set(needed).isdisjoint(spec.tasks))
    return True


def not_served(endpoint: Endpoint, spec: PoolingSpec | None) -> APIError:
    """The error for a request to an endpoint that the model hasn't."""
    if spec is None:
        has = "this model generates text. For embeddings, classes and scores, start a server of a model that pools"
        advice = "raycore serve MODEL --runner pooling"
    else:
        served = [each.path for each in endpoints_with(Rule.POOLS) if is_served(each, spec)]
        has = f"this model pools ({', '.join(spec.tasks)}), and serves {', '.join(served)}. For {endpoint.path}, start"
        has += " a server of another model" if Rule.POOLS in endpoint.rules else " a server of a model that generates"
        pools = Rule.POOLS in endpoint.rules
        advice = f"raycore serve MODEL --runner {'pooling' if pools else 'generate'}"
    return APIError(404, f"{endpoint.path} isn't served: {has}: {advice}", code="unsupported_endpoint")


def refuse_others(app: FastAPI, spec: PoolingSpec | None) -> None:
    """Add the endpoints that a model hasn't. They answer with the error."""
    for endpoint in _others(spec):
        _refuse(app, endpoint, spec)


def _others(spec: PoolingSpec | None) -> Iterable[Endpoint]:
    return (endpoint for endpoint in Endpoint if not is_served(endpoint, spec))


def _refuse(app: FastAPI, endpoint: Endpoint, spec: PoolingSpec | None) -> None:
    @endpoint.route(app, include_in_schema=False)
    async def refused() -> None:
        raise not_served(endpoint, spec)
