"""Endpoints that a server doesn't have, for its model or its options: errors that say what to start instead."""

from __future__ import annotations

from typing import NoReturn

from fastapi import FastAPI
from starlette.requests import Request
from starlette.routing import Route

from raycore.parts.pooling.models.pooling import PoolingSpec
from raycore.server.endpoints import Endpoint, Rule, endpoints_with
from raycore.server.errors import APIError
from raycore.server.options import ServerOptions

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

_FLAGS = {
    Rule.CONTROLS: ("enable_admin_endpoints", "--enable-admin-endpoints --api-key KEY"),
    Rule.SHOWS_TOKENIZER: ("enable_tokenizer_info_endpoint", "--enable-tokenizer-info-endpoint"),
}
"""The option that an endpoint needs by its rule, and the flags that turn it on."""


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
    return _error(endpoint.path, f"{has}: {advice}")


def refuse_others(app: FastAPI, spec: PoolingSpec | None, options: ServerOptions) -> None:
    """Add the endpoints that a server hasn't. They answer with the error."""
    for endpoint in Endpoint:
        error = not_served(endpoint, spec) if not is_served(endpoint, spec) else _turned_off(endpoint, options)
        if error is not None:
            _refuse(app, endpoint.path, endpoint.method, error)
    if options.http.disable_fastapi_docs:
        for path in ("/docs", "/openapi.json"):
            reason = "the server was started with --disable-fastapi-docs"
            _refuse(app, path, "GET", _error(path, reason))


def _turned_off(endpoint: Endpoint, options: ServerOptions) -> APIError | None:
    """The error for a request to an endpoint that the options leave out; None: they don't."""
    for rule, (option, flags) in _FLAGS.items():
        if rule in endpoint.rules and not getattr(options, option):
            return _error(endpoint.path, f"{option} is off. Start the server with {flags}")
    return None


def _error(path: str, reason: str) -> APIError:
    return APIError(404, f"{path} isn't served: {reason}", code="unsupported_endpoint")


def _refuse(app: FastAPI, path: str, method: str, error: APIError) -> None:
    async def refused(_: Request) -> NoReturn:
        raise error.with_traceback(None)

    # a route of FastAPI's own would have it look for parameters: for all of these, a fifth of an application's start
    app.router.routes.append(Route(path, refused, methods=[method], include_in_schema=False))
